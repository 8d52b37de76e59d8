/* The contract between a compiled model and whoever loads it: the same for every target.
 *
 * One .so is one model on one target. All functions are C, return MK_OK or a negative code, and leave a text in
 * mk_last_error(). One mk_model is one request at a time: its calls must not overlap, except mk_cancel().
 * mkpack/abi.py mirrors the structs; the generated header asserts their sizes and offsets, so a difference does not
 * compile. */
#ifndef MKPACK_ABI_H
#define MKPACK_ABI_H
#include <stdint.h>

#define MK_ABI_VERSION 2
#define MK_MAX_STEP_TOKENS 16
#define MK_ADDRESS_BYTES 128

enum { MK_OK = 0, MK_ERR_ARGUMENT = -1, MK_ERR_CONTEXT = -2, MK_ERR_TIMEOUT = -3, MK_ERR_MEMORY = -4, MK_ERR_DEVICE = -5 };

/* Bits of mk_options.flags. Kernels of ABI version 1 ignore them: there the field was padding. */
enum {
  MK_OPTION_RANKS = 1, /* CPU: every rank is a group of threads with memory of its own */
  MK_OPTION_LOOPED = 2 /* GPU: of the ranks one alone, whose blob is the only one in weights, with its peers looped back:
                          what it sends to them it receives in their place. For its speed; its results mean nothing */
};

/* Why a generation ended. */
enum { MK_STOP_TOKEN = 0, MK_STOP_LENGTH = 1, MK_STOP_CONTEXT = 2, MK_STOP_CANCELLED = 3 };

typedef struct mk_model mk_model;

typedef struct {
  const void* const* weights; /* one packed blob per rank, 4096-byte aligned, alive until mk_destroy */
  uint64_t weights_bytes;     /* of each blob; must equal the compiled-in size */
  int32_t num_ranks;          /* must equal the compiled-in number, also where one of them is looped back */
  int32_t threads;            /* CPU: worker threads including the caller; 0 = one per core this process may use. A rank
                                 with memory of its own has at least one */
  int32_t context;            /* KV cache positions, at most the compiled-in limit; 0 = that limit */
  int32_t flags;              /* MK_OPTION_*; 0 = none */
  double wait_limit_s;        /* longest wait inside a step before it is given up with MK_ERR_TIMEOUT */
} mk_options;

typedef struct {
  int32_t first_rank; /* of this process */
  int32_t num_ranks;  /* of this process, at most those that may share a GPU; the others are in other processes of this host */
  int32_t device;     /* GPU that they run on, of those that this process sees */
  int32_t pad;
} mk_placement;

typedef struct {
  float temperature;        /* 0 = greedy (ties to the lowest token id) */
  float top_p;              /* 1 = off */
  float min_p;              /* 0 = off */
  float repetition_penalty; /* 1 = off; over every token in the KV cache and the new ones */
  int32_t top_k;            /* 0 = off */
  int32_t max_new_tokens;   /* at least 1 */
  uint64_t seed;            /* draws depend on (seed, position) only */
  const int32_t* stop_tokens;
  int32_t num_stop_tokens;
  int32_t pad;
} mk_request;

typedef struct {
  int32_t stop_reason;
  int32_t num_new_tokens; /* a stop token, when one ended it, included */
  int32_t num_prompt_tokens;
  int32_t pad;
  double prefill_s; /* until the first token was chosen */
  double decode_s;  /* all later tokens */
} mk_result;

typedef struct {
  double step_s;  /* of the device, without the host's part */
  double experts; /* distinct experts that the tokens chose, mean over the layers */
} mk_timing;

typedef struct {
  mk_timing step;    /* a step with its exchanges */
  mk_timing without; /* the same step that sends nothing and awaits nothing: what it computes, and so the experts, differ */
  int64_t exchanges; /* of a step */
  int64_t bytes;     /* that they all brought to this rank */
} mk_rank_timing;

typedef struct {
  int32_t layers; /* of the model, and one that stands for what follows them */
  int32_t rows;   /* what is traced: phases, and streams of weights */
  int32_t sms;
  int32_t pad;
  const char* names; /* of the rows, a line each: who, a blank, what; static */
} mk_trace_shape;

/* Called on the calling thread as each token is chosen (a stop token included); non-zero ends the generation. */
typedef int32_t (*mk_token_callback)(void* user, int32_t token);

#ifdef __cplusplus
extern "C" {
#endif
/* JSON text compiled into this .so; must equal the manifest's. Never fails. */
const char* mk_describe(void);
/* Text of the last error on this thread; empty when none. */
const char* mk_last_error(void);
int32_t mk_create(const mk_options* options, mk_model** model);
void mk_destroy(mk_model* model);
/* Number of positions in the KV cache. */
int32_t mk_length(const mk_model* model);
/* Forgets every position from `length` on. */
int32_t mk_truncate(mk_model* model, int32_t length);
/* Runs 1..MK_MAX_STEP_TOKENS tokens; logits (may be NULL) receives [num_logits, vocab_size] float32 for the last
 * num_logits tokens. */
int32_t mk_step(mk_model* model, const int32_t* tokens, int32_t num_tokens, float* logits, int32_t num_logits);
/* Runs the prompt (at least one token) after what the cache holds, then chooses tokens until something stops it. The
 * last chosen token is not in the cache afterwards. */
int32_t mk_generate(mk_model* model, const int32_t* prompt, int32_t num_prompt, const mk_request* request,
                    mk_token_callback callback, void* user, mk_result* result);
/* Ends a running mk_generate soon; may be called from any thread or a signal handler. */
void mk_cancel(mk_model* model);
/* Bytes per second that this model's threads read from its weights, one pass; the ceiling that speeds are held to. */
int32_t mk_read_bandwidth(mk_model* model, double* bytes_per_second);

/* A kernel may lack what follows. */

/* Runs 1..MK_MAX_STEP_TOKENS tokens with logits of all of them after what the cache holds, and forgets them again. */
int32_t mk_time_step(mk_model* model, const int32_t* tokens, int32_t num_tokens, mk_timing* timing);
/* Runs num_steps steps after what the cache holds, and forgets them again: of one token and those that are chosen after it,
 * or of the same several tokens each. stamps receives [num_steps][layers][rows][sms][4] nanoseconds of one clock, 0 where
 * there is none: of a phase when it was entered, its input was there, its products were done, its results were published; of
 * a stream when its first page could be issued, 0, 0, when its last had been. With stamps NULL only the shape is told.
 * MK_ERR_ARGUMENT when the kernel was compiled without. */
int32_t mk_trace(mk_model* model, const int32_t* tokens, int32_t num_tokens, int32_t num_steps, int64_t* stamps,
                 mk_trace_shape* shape);
/* mk_step that also tells the hidden states: hidden receives [num_layers, num_tokens, hidden_size] float32, the residual of
 * every token after each of `layers` (from 0 on), in their order; after the last layer before the final norm. */
int32_t mk_step_taps(mk_model* model, const int32_t* tokens, int32_t num_tokens, float* logits, int32_t num_logits,
                     const int32_t* layers, int32_t num_layers, float* hidden);
/* mk_time_step of a rank that is looped back, with its exchanges and without. */
int32_t mk_time_rank(mk_model* model, const int32_t* tokens, int32_t num_tokens, mk_rank_timing* timing);

/* Ranks in several processes. Each makes its own, tells their addresses, is told those of all and then makes the same calls
 * as the others, from the same length on: mk_step, mk_generate, mk_time_step. What mk_step and mk_generate give is told where
 * rank 0 is. Elsewhere mk_step fills in no logits and looks only at their number; mk_generate ends with the same token but,
 * where rank 0's was cancelled, may have kept more positions, and calls back when all tokens are chosen. */

/* mk_create of a part of the ranks: weights has their blobs, num_ranks is that of all. */
int32_t mk_create_placed(const mk_options* options, const mk_placement* placement, mk_model** model);
/* What another process needs to reach the memory of this one's ranks: addresses receives [num_ranks of the placement]
 * [MK_ADDRESS_BYTES]. */
int32_t mk_addresses(mk_model* model, uint8_t* addresses);
/* Opens the memory of the other processes' ranks; addresses: [all ranks][MK_ADDRESS_BYTES]. With NULL closes it: before any
 * process destroys its model, all must have done that. */
int32_t mk_connect(mk_model* model, const uint8_t* addresses);
#ifdef __cplusplus
}
#endif
#endif
