// The CPU megakernel: one step is every phase of every layer, run by threads that meet only at barriers, and by ranks
// that meet only in exchanges. And the C ABI.
#include <iterator>

#include "abi.h"
#include "cpu/attention.h"
#include "cpu/head.h"
#include "cpu/mlp.h"
#include "cpu/ranks.h"
#include "cpu/sample.h"

namespace mk {

static_assert(m::tokens_per_step >= 1 && m::tokens_per_step <= MK_MAX_STEP_TOKENS);

// A thread's share of one phase.
inline void run_phase(State& s, m::Phase phase, int layer, int tid) {
  Local& local = s.locals[static_cast<size_t>(tid)];
  switch (phase) {
    case m::Phase::qkv: return qkv_phase(s, layer, tid);
    case m::Phase::qk_squares: return squares_phase(s, tid);
    case m::Phase::attention: return attention_phase(s, layer, tid);
    case m::Phase::output: return output_phase(s, layer, tid);
    case m::Phase::attn_residual: return residual_phase(s, m::layers[layer].attn_residual_gate, nullptr, tid);
    case m::Phase::mlp_residual: {
      const float* weight = s.whole<float>(m::layers[layer].mlp_out_norm);
      return residual_phase(s, m::layers[layer].mlp_residual_gate, weight, tid);
    }
    case m::Phase::router:
      mlp_norm(s, layer, tid);
      if constexpr (m::num_experts > 0) router_phase(s, layer, tid);
      return;
    case m::Phase::pre_proj:
      if constexpr (m::narrow_experts) pre_proj_phase(s, layer, tid);
      return;
    case m::Phase::post_proj:
      if constexpr (m::narrow_experts) post_proj_phase(s, layer, tid);
      return;
    case m::Phase::gate_up:
      if (m::layers[layer].moe) {
        if constexpr (m::num_experts > 0) {
          route(s, layer, local);
          if constexpr (m::narrow_experts) pre_norm(s, layer, tid);
          gate_up_phase<m::fmt_experts, kNarrowBlocks, m::moe_intermediate_size, m::moe_inner_tiles, true>(s, layer, tid);
        }
      } else if constexpr (m::dense_intermediate_size > 0) {
        mlp_norm(s, layer, tid);
        route_dense(s, local);
        gate_up_phase<m::fmt_dense, kHiddenBlocks, m::dense_intermediate_size, m::dense_inner_tiles, false>(s, layer, tid);
      }
      return;
    case m::Phase::down:
      if (m::layers[layer].moe) {
        if constexpr (m::narrow_experts) narrow_down_phase<m::fmt_experts, m::moe_intermediate_size>(s, layer, tid);
        else if constexpr (m::num_experts > 0) down_phase<m::fmt_experts, m::moe_intermediate_size, true>(s, layer, tid);
      } else if constexpr (m::dense_intermediate_size > 0) {
        down_phase<m::fmt_dense, m::dense_intermediate_size, false>(s, layer, tid);
      }
      return;
    case m::Phase::head: return head_phase(s, tid);
    case m::Phase::combine:  // by whoever finishes the attention of a KV head
    case m::Phase::embed:    // by thread 0, between steps
    case m::Phase::sample: return;
  }
}

// Whether a layer ends with stage i; all threads meet after it.
constexpr bool ends_layer(size_t i) {
  return m::stages[i].layer >= 0 && (i + 1 == std::size(m::stages) || m::stages[i + 1].layer != m::stages[i].layer);
}
constexpr bool layers_end_at_barriers() {
  for (size_t i = 0; i < std::size(m::stages); i++)
    if (ends_layer(i) && !m::stages[i].barrier) return false;
  return true;
}
static_assert(layers_end_at_barriers(), "x is not whole when it is tapped");

// Keeps x for whoever asked for it after this layer. By thread 0, on its way from the layer's last barrier to the next one,
// before which nobody changes x.
inline void tap(const State& s, int layer) {
  const Step& step = s.step;
  for (int i = 0; i < s.taps.count; i++)
    if (s.taps.layers[i] == layer)
      for (int t = 0; t < step.count; t++)
        for (int channel = 0; channel < m::hidden_size; channel++)
          s.taps.hidden[(int64_t{i} * step.count + t) * m::hidden_size + channel] =
              s.x[(int64_t{channel / 16} * step.slots + t) * 16 + channel % 16];
}

// Every thread's part of one step, in the order of the schedule. False: a wait was given up. before(stage) comes before
// each: tests hold threads up there.
template <class Before>
inline bool forward(State& s, int tid, Before before) {
  // Read before the last barrier: after it thread 0 may be setting up the next step already.
  const bool head = s.step.logits > 0;
  for (size_t i = 0; i < std::size(m::stages); i++) {
    const m::Stage& stage = m::stages[i];
    if (stage.phase == m::Phase::head && !head) return true;
    if (s.link && tid == 0) s.link->note(s.rank, m::phase_names[static_cast<size_t>(stage.phase)], stage.layer);
    before(stage);
    run_phase(s, stage.phase, stage.layer, tid);
    if (stage.barrier && !end_phase(s, stage.phase, stage.layer, stage.words > 0, tid)) return false;
    if (tid == 0 && s.taps.count && ends_layer(i)) tap(s, stage.layer);
  }
  return true;
}

// A thread's part of all steps until one of 0 tokens. next(): sets up s.step, on thread 0 of who leads.
template <class Next, class Before>
inline void serve(State& s, int tid, Next next, Before before) {
  const DefaultFloats floats;
  do {
    const bool sets = tid == 0 && s.leads();
    if (sets) next();
    if (s.link && tid == 0) s.link->note(s.rank, m::phase_names[static_cast<size_t>(m::Phase::embed)], -1);
    // The others wait for whoever sets up the step, which may rightly take long.
    if (s.link && !end_phase(s, m::Phase::embed, -1, true, tid, sets || !s.leads())) return;
    if (s.link && s.step.count == 0) return;
    if (tid == 0 && s.step.count > 0) begin_step(s);
    if (!s.team.barrier(tid, m::phase_names[static_cast<size_t>(m::Phase::embed)], -1, tid == 0 || s.link)) return;
    if (s.step.count == 0) return;
  } while (forward(s, tid, before));
}
inline void serve_thread(void* self, int tid) {
  serve(*static_cast<State*>(self), tid, [] {}, [](const m::Stage&) {});
}

// All ranks' parts of a model: one State of all of them, or one each.
struct Ranks {
  Ranks(const mk_options& o, int threads, bool crowded) {
    const int context = o.context ? o.context : m::context;
    const bool apart = o.flags & MK_OPTION_RANKS;
    int each[m::ranks];
    for (int r = 0; r < m::ranks; r++) {
      const auto [lo, hi] = share(threads, r, m::ranks);
      each[r] = std::max(static_cast<int>(hi - lo), 1);
    }
    if (apart) link = std::make_unique<Link>(m::ranks, longest_message(), each, o.wait_limit_s, failure, crowded);
    for (int r = 0; r < (apart ? m::ranks : 1); r++) {
      const Options options{o.weights, apart ? each[r] : threads, context, o.wait_limit_s, crowded};
      states.push_back(std::make_unique<State>(options, failure, apart ? r : -1, link.get()));
    }
  }

  // Runs job(state, tid) on every thread of every rank; the caller is thread 0 of the first, for which it runs mine().
  template <class Mine>
  void run(Team::Job job, Mine mine) {
    for (auto& s : states) s->team.start(job, s.get());
    mine();
    for (auto& s : states) s->team.wait();
  }

  Failure failure;
  std::unique_ptr<Link> link;
  std::vector<std::unique_ptr<State>> states;
};

}  // namespace mk

using namespace mk;

struct mk_model {
  Ranks ranks;
  State& state = *ranks.states[0];
  Sampler sampler;
  std::atomic<bool> cancelled{false};

  mk_model(const mk_options& o, int threads, bool crowded) : ranks(o, threads, crowded) {}

  void set_step(const int32_t* tokens, int count, int logits, bool whole) {
    Step& step = state.step;
    step.count = count;
    step.slots = round_tokens(count);
    step.start = state.length;
    step.logits = logits;
    step.whole = whole;
    state.taps = {};
    std::copy(tokens, tokens + count, step.tokens);
    state.length += count;
  }
  void end_steps() { state.step.count = 0; }

  // Runs the steps that next() sets up, until it ends them.
  template <class Next>
  void steps(Next next) {
    ranks.run(serve_thread, [&] { serve(state, 0, next, [](const m::Stage&) {}); });
  }
};

namespace {

// No destructor: one that is due at a thread's end would keep the library mapped after it is closed.
thread_local char last_error[512];

int32_t fail(int32_t code, const std::string& text) {
  last_error[text.copy(last_error, sizeof last_error - 1)] = 0;
  return code;
}

int32_t check_tokens(const mk_model* model, const int32_t* tokens, int32_t count) {
  for (int32_t i = 0; i < count; i++)
    if (tokens[i] < 0 || tokens[i] >= m::vocab_size)
      return fail(MK_ERR_ARGUMENT, "token " + std::to_string(tokens[i]) + " at " + std::to_string(i) +
                                       " is outside the vocabulary of " + std::to_string(m::vocab_size));
  if (count > model->state.context - model->state.length)
    return fail(MK_ERR_CONTEXT, std::to_string(count) + " tokens do not fit: " + std::to_string(model->state.length) +
                                    " of " + std::to_string(model->state.context) + " positions are taken");
  return MK_OK;
}

bool wants_logits(const mk_request& r) { return r.temperature != 0.0f || r.repetition_penalty != 1.0f; }

int choose(mk_model* model, const mk_request& r) {
  State& s = model->state;
  if (!wants_logits(r)) return greedy_token(s);
  float* row = s.logits.data() + int64_t{s.step.logits - 1} * kVocabTiles * 16;
  return model->sampler.pick(row, s.history.data(), s.length, r, s.length);
}

bool is_stop(const mk_request& r, int token) {
  return std::find(r.stop_tokens, r.stop_tokens + r.num_stop_tokens, token) != r.stop_tokens + r.num_stop_tokens;
}

// A thread's share of its State's weights.
void read_weights(void* self, int tid) {
  const State& s = *static_cast<const State*>(self);
  W a = wbroadcast(0), b = a, c = a, d = a;
  for (int r = s.first_rank(); r < s.end_rank(); r++) {
    const auto [lo, hi] = share(m::blob_bytes / 256, tid, s.team.size());
    const float* p = s.at<float>(r, 0);
    for (int64_t i = lo * 64; i < hi * 64; i += 4 * kLanes) {
      _mm_prefetch(reinterpret_cast<const char*>(p + i) + 4096, _MM_HINT_T0);
      a = wadd(a, wload(p + i));
      b = wadd(b, wload(p + i + kLanes));
      c = wadd(c, wload(p + i + 2 * kLanes));
      d = wadd(d, wload(p + i + 3 * kLanes));
    }
  }
  // The sums must be used, or the loads would be removed.
  float out[kLanes];
  wstore(out, wadd(wadd(a, b), wadd(c, d)));
  volatile float sink = out[0];
  (void)sink;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) const char* mk_describe(void) { return m::description; }

__attribute__((visibility("default"))) const char* mk_last_error(void) { return last_error; }

__attribute__((visibility("default"))) int32_t mk_create(const mk_options* o, mk_model** out) {
  if (o->num_ranks != m::ranks)
    return fail(MK_ERR_ARGUMENT, "compiled for " + std::to_string(m::ranks) + " ranks, given " + std::to_string(o->num_ranks));
  if (o->weights_bytes != m::blob_bytes)
    return fail(MK_ERR_ARGUMENT, "a rank's weights must be " + std::to_string(m::blob_bytes) + " bytes, given " +
                                     std::to_string(o->weights_bytes));
  for (int r = 0; r < m::ranks; r++) {
    if (!o->weights[r]) return fail(MK_ERR_ARGUMENT, "the weights of rank " + std::to_string(r) + " are missing");
    if (reinterpret_cast<uintptr_t>(o->weights[r]) % 64)
      return fail(MK_ERR_ARGUMENT, "the weights of rank " + std::to_string(r) + " are not aligned to 64 bytes");
  }
  if (o->flags & ~MK_OPTION_RANKS) return fail(MK_ERR_ARGUMENT, "flags has bits that this kernel does not know");
  if (o->flags & MK_OPTION_RANKS && m::ranks == 1)
    return fail(MK_ERR_ARGUMENT, "compiled for 1 rank, which has nobody to exchange with");
  if (o->context < 0 || o->context > m::context)
    return fail(MK_ERR_ARGUMENT, "context must be at most " + std::to_string(m::context) + ", given " + std::to_string(o->context));
  if (!(o->wait_limit_s > 0)) return fail(MK_ERR_ARGUMENT, "wait_limit_s must be above 0");
  cpu_set_t set;
  const int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  const int threads = o->threads > 0 ? o->threads : cores;
  if (threads > 1024) return fail(MK_ERR_ARGUMENT, "more than 1024 threads");
  try {
    const int running = o->flags & MK_OPTION_RANKS ? std::max(threads, m::ranks) : threads;
    *out = new mk_model(*o, threads, running > cores);
    return MK_OK;
  } catch (const std::exception& e) {
    return fail(MK_ERR_MEMORY, "cannot allocate a KV cache of " + std::to_string(o->context ? o->context : m::context) +
                                   " positions and start " + std::to_string(threads) + " threads: " + e.what() +
                                   "; ask for a smaller context or fewer threads");
  }
}

__attribute__((visibility("default"))) void mk_destroy(mk_model* model) { delete model; }

__attribute__((visibility("default"))) int32_t mk_length(const mk_model* model) { return model->state.length; }

__attribute__((visibility("default"))) int32_t mk_truncate(mk_model* model, int32_t length) {
  if (length < 0 || length > model->state.length)
    return fail(MK_ERR_ARGUMENT, "cannot truncate " + std::to_string(model->state.length) + " positions to " + std::to_string(length));
  model->state.length = length;
  return MK_OK;
}

__attribute__((visibility("default"))) int32_t mk_step_taps(mk_model* model, const int32_t* tokens, int32_t count,
                                                            float* logits, int32_t num_logits, const int32_t* layers,
                                                            int32_t num_layers, float* hidden) {
  State& s = model->state;
  if (count < 1 || count > kMaxTokens)
    return fail(MK_ERR_ARGUMENT, "a step takes 1 to " + std::to_string(kMaxTokens) + " tokens, given " + std::to_string(count));
  if (num_logits < 0 || num_logits > count) return fail(MK_ERR_ARGUMENT, "num_logits must be 0 to the number of tokens");
  for (int32_t i = 0; i < num_layers; i++)
    if (layers[i] < 0 || layers[i] >= m::num_layers)
      return fail(MK_ERR_ARGUMENT, "layer " + std::to_string(layers[i]) + " is not one of the " +
                                       std::to_string(m::num_layers) + " layers");
  if (s.failure.failed()) return fail(MK_ERR_TIMEOUT, s.failure.text());
  if (int32_t code = check_tokens(model, tokens, count)) return code;
  bool done = false;
  model->steps([&] {
    if (done) return model->end_steps();
    model->set_step(tokens, count, logits ? num_logits : 0, true);
    s.taps = {layers, num_layers, hidden};
    done = true;
  });
  if (s.failure.failed()) return fail(MK_ERR_TIMEOUT, s.failure.text());
  for (int i = 0; logits && i < num_logits; i++)
    std::copy_n(s.logits.data() + int64_t{i} * kVocabTiles * 16, m::vocab_size, logits + int64_t{i} * m::vocab_size);
  return MK_OK;
}

__attribute__((visibility("default"))) int32_t mk_step(mk_model* model, const int32_t* tokens, int32_t count, float* logits,
                                                       int32_t num_logits) {
  return mk_step_taps(model, tokens, count, logits, num_logits, nullptr, 0, nullptr);
}

__attribute__((visibility("default"))) int32_t mk_generate(mk_model* model, const int32_t* prompt, int32_t num_prompt,
                                                           const mk_request* request, mk_token_callback callback,
                                                           void* user, mk_result* result) {
  using clock = std::chrono::steady_clock;
  State& s = model->state;
  const mk_request& r = *request;
  if (num_prompt < 1) return fail(MK_ERR_ARGUMENT, "the prompt is empty");
  if (r.max_new_tokens < 1) return fail(MK_ERR_ARGUMENT, "max_new_tokens must be at least 1");
  if (!(r.temperature >= 0) || !(r.top_p > 0) || !(r.min_p >= 0 && r.min_p <= 1) || !(r.repetition_penalty > 0))
    return fail(MK_ERR_ARGUMENT, "sampling values out of range");
  if (s.failure.failed()) return fail(MK_ERR_TIMEOUT, s.failure.text());
  if (int32_t code = check_tokens(model, prompt, num_prompt)) return code;
  model->cancelled.store(false);
  *result = {};
  result->num_prompt_tokens = num_prompt;
  const auto start = clock::now();
  auto first = start;
  int prompt_at = 0;

  // Thread 0, between steps: chooses a token, reports it, and sets up the next step or ends the job.
  model->steps([&] {
    if (prompt_at == num_prompt) {
      const int32_t token = choose(model, r);
      if (result->num_new_tokens++ == 0) first = clock::now();
      const bool cancel = callback && callback(user, token) != 0;
      bool more = false;
      if (is_stop(r, token)) result->stop_reason = MK_STOP_TOKEN;
      else if (cancel || model->cancelled.load()) result->stop_reason = MK_STOP_CANCELLED;
      else if (result->num_new_tokens >= r.max_new_tokens) result->stop_reason = MK_STOP_LENGTH;
      else if (s.length >= s.context) result->stop_reason = MK_STOP_CONTEXT;
      else more = true;
      return more ? model->set_step(&token, 1, 1, wants_logits(r)) : model->end_steps();
    }
    if (model->cancelled.load()) {
      result->stop_reason = MK_STOP_CANCELLED;
      return model->end_steps();
    }
    const int n = std::min(kMaxTokens, num_prompt - prompt_at);
    model->set_step(prompt + prompt_at, n, prompt_at + n == num_prompt ? 1 : 0, wants_logits(r));
    prompt_at += n;
  });
  if (s.failure.failed()) return fail(MK_ERR_TIMEOUT, s.failure.text());
  if (result->num_new_tokens == 0) first = clock::now();
  result->prefill_s = std::chrono::duration<double>(first - start).count();
  result->decode_s = std::chrono::duration<double>(clock::now() - first).count();
  return MK_OK;
}

__attribute__((visibility("default"))) void mk_cancel(mk_model* model) { model->cancelled.store(true); }

__attribute__((visibility("default"))) int32_t mk_read_bandwidth(mk_model* model, double* bytes_per_second) {
  if (model->ranks.failure.failed()) return fail(MK_ERR_TIMEOUT, model->ranks.failure.text());
  double best = 0;
  for (int pass = 0; pass < 4; pass++) {  // the first one warms the page tables
    const auto start = std::chrono::steady_clock::now();
    model->ranks.run(read_weights, [&] { read_weights(&model->state, 0); });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (pass > 0) best = std::max(best, static_cast<double>(m::blob_bytes) * m::ranks / seconds);
  }
  *bytes_per_second = best;
  return MK_OK;
}

}  // extern "C"
