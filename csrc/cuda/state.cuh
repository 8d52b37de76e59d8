// A loaded model on the GPU: its memory, and launches of the kernels.
#pragma once
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>
#include "peers.cuh"

namespace mk {

namespace m = model;

class HostStream {
 public:
  HostStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream"); }
  ~HostStream() { cudaStreamDestroy(stream_); }
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Memory of the host that kernels write while they run.
class HostMailbox {
 public:
  HostMailbox() {
    check(cudaHostAlloc((void**)&mail_, kBytes, cudaHostAllocMapped), "allocating memory that the GPU can reach");
    check(cudaHostGetDevicePointer((void**)&device_, mail_, 0), "mapping memory of the host");
  }
  ~HostMailbox() { cudaFreeHost(mail_); }
  HostMailbox(const HostMailbox&) = delete;
  HostMailbox& operator=(const HostMailbox&) = delete;
  volatile Mailbox* operator->() const { return mail_; }
  Mailbox* device() const { return device_; }
  void clear(int tokens) {
    mail_->cancel = 0;
    for (int i = 0; i < tokens; i++) ((volatile int32_t*)mail_->tokens)[i] = 0;
  }

 private:
  static constexpr size_t kBytes = sizeof(Mailbox) + (kMaxContext + 2) * sizeof(int32_t);
  Mailbox* mail_ = nullptr;
  Mailbox* device_ = nullptr;
};

// Activations of the step kernel and exchange buffers of decode_kernel, in one allocation.
constexpr size_t kAttentionUnits = (size_t)kKvHeads * kMaxSplits;
struct Workspace {
  size_t bytes = 0;
  template <class T>
  size_t place(size_t n) {
    const size_t at = bytes;
    bytes += (n * sizeof(T) + 255) / 256 * 256;
    return at;
  }
  const size_t hidden = place<uint16_t>(kHiddenSize);
  const size_t router_input = place<float>(kRouterInputSize);
  const size_t squares = place<float>(kSquaresSize);
  const size_t qkv = place<float>((size_t)kMaxTokens * kQkvRows);
  const size_t partial = place<float>(kAttentionUnits * kAttentionRows * kHeadDim);
  const size_t partial_sums = place<float2>(kAttentionUnits * kAttentionRows);
  const size_t attention = place<uint16_t>((size_t)kMaxTokens * kModelQRows);
  const size_t router_logits = place<float>((size_t)kMaxTokens * kExperts);
  const size_t swiglu = place<uint16_t>(kSwigluSize);
  const size_t logits = place<float>((size_t)kMaxTokens * kModelHeadRows);
  const size_t best = place<float2>((size_t)kMaxTokens * kBests);
  const size_t shared_token = place<int32_t>(2);
  const size_t history = place<int32_t>(kMaxContext + 1);
  const size_t exchange = place<uint64_t>(kFastDecode ? kExchangeWords : 0);
  const size_t barrier = place<uint32_t>(1);
  const size_t epochs = place<uint32_t>(1);
  const size_t report = place<Report>(1);
  const size_t experts_hit = place<uint32_t>(1);
  const size_t receive = place<uint32_t>(kReceiveWords);
  const size_t sent = place<uint32_t>(kRanks);
  const size_t loop_counts = place<uint32_t>(2);
};

#ifndef MK_MORE_SPLITS
// Positions from which on decode_kernel is faster with 16 and with 32 KV splits, measured at the shape of Qwen3-30B-A3B on
// an H200. A test has others.
#define MK_MORE_SPLITS 704, 5008
#endif
constexpr int kMoreSplits[2] = {MK_MORE_SPLITS};

// A rank's memory on its device, which must be the current one when it is made.
struct RankState {
  const int device;
  const Workspace places;
  DeviceArray<uint8_t> weights{m::blob_bytes};
  DeviceArray<uint8_t> kv{(size_t)kKvBytes};
  DeviceArray<float2> rope{(size_t)kMaxContext * (kRotary / 2)};
  DeviceArray<uint8_t> work;
  StepParams params{};

  // shared: other processes are going to write into its workspace.
  RankState(const void* blob, int device, bool shared);
  int32_t* history() const { return (int32_t*)(work.get() + places.history); }
  float* logits() const { return (float*)(work.get() + places.logits); }
};

inline size_t shared_bytes(const Workspace& places) {
  return (places.bytes + kSharedUnit - 1) / kSharedUnit * kSharedUnit;
}

// Ranks that share a device, and so a launch.
struct DeviceRanks {
  int device;
  cudaStream_t stream;
  std::vector<RankState*> ranks;
};

}  // namespace mk

// What is said of one rank's memory is of the first rank's here, which is rank 0 unless that is in another process.
struct mk_model : mk::RankState {
  const int context;
  const double wait_limit_s;
  mk::HostMailbox mail;
  mk::HostStream stream;
  std::vector<std::unique_ptr<mk::RankState>> others;   // ranks after it
  std::vector<std::unique_ptr<mk::HostStream>> streams;  // of devices 1 and on
  std::vector<mk::DeviceRanks> devices;
  uint32_t epochs = 0;     // used in the exchange buffers of decode_kernel
  uint32_t arrivals = 0;   // at the grid barrier
  uint32_t exchanges = 0;  // between ranks, where flags count them
  int32_t length = 0;      // positions in the KV cache
  int32_t failure = MK_OK;
  std::string failure_text;
  std::atomic<bool> cancelled{false};
  std::unique_ptr<mk::DeviceArray<float>> taps;  // [kLayers][kMaxTokens][kHidden], once it was asked for

  const bool looped;  // there is one rank, of several, and it is its own peers
  const mk::Placement placement;
  std::vector<std::unique_ptr<mk::PeerMemory>> opened;  // of other processes, once they are connected
  std::vector<uint8_t*> works;                          // of every rank its workspace; NULL where it is not opened

  // looped: of blobs there is one.
  mk_model(const void* const* blobs, const mk::Placement& placement, int context, double wait_limit_s, bool looped);

  void addresses(uint8_t* to);
  void connect(const uint8_t* addresses);
  void disconnect();
  bool here(int rank) const { return rank >= placement.first && rank < placement.first + placement.count; }
  bool connected() const { return placement.alone() || !opened.empty(); }

  // Puts a launch of the step kernel into the streams: `given` tokens, which lie in the history from position `length` on,
  // then new_tokens chosen ones, of which the host finds the first in the mailbox at `made`.
  void launch(int given, int new_tokens, int made, int num_logits, const mk_request* request);
  // The same for decode_kernel, where this shape has it: runs the token behind `length`, which was chosen, and those that it
  // chooses, at most new_tokens of them.
  template <bool kFast>
  void launch_decode(int new_tokens, int made, const mk_request& request);
  // Waits for the streams. Throws what the kernels reported.
  void finish();
  // Calls work(rank, its number, its stream) for every rank that is here, on its device.
  template <class Work>
  void each_rank(Work&& work);
  // Copies tokens to their positions behind `length`.
  void give(const int32_t* tokens, int count) {
    each_rank([&](mk::RankState& r, int, cudaStream_t stream) {
      mk::check(cudaMemcpyAsync(r.history() + length, tokens, count * sizeof(int32_t), cudaMemcpyHostToDevice, stream),
                "copying tokens to the GPU");
    });
  }
  // When a rank gave up a wait, adds the reports of other processes to those of this one, and tells which rank it was; else -1.
  int ask_others(std::vector<mk::Report>& reports);
  // Waits until the ranks of other processes have ended the launch that finish() waited for here.
  void await_others();
  // Copies the logits of a row of the last launch: every rank has those of its part of the vocabulary; where one is looped
  // back, the others' are 0.
  void copy_logits(int row, float* to);
  // Chosen token i, as soon as it is there; -1 when the kernel ended without it.
  int32_t await_token(int i);
  // The same where rank 0 is in another process, which its mailbox tells: `count` places behind the prompt are marked before a
  // launch, and after it hold the tokens that it chose, or -1.
  void mark_tokens(int first, int count);
  std::vector<int32_t> chosen_tokens(int first, int count);
};

template <class Work>
void mk_model::each_rank(Work&& work) {
  int rank = placement.first;
  for (const mk::DeviceRanks& d : devices) {
    if constexpr (mk::kRanks > 1) mk::check(cudaSetDevice(d.device), "turning to a GPU");
    for (mk::RankState* r : d.ranks) work(*r, rank++, d.stream);
  }
  if constexpr (mk::kRanks > 1) mk::check(cudaSetDevice(device), "turning to the first GPU");
}

inline mk::RankState::RankState(const void* blob, int device, bool shared)
    : device(device), work(shared ? shared_bytes(places) : places.bytes) {
  check(cudaMemcpy(weights.get(), blob, m::blob_bytes, cudaMemcpyHostToDevice), "copying the weights to the GPU");
  // Masked positions are multiplied by zero, so the cache must hold numbers.
  check(cudaMemset(kv.get(), 0, kKvBytes), "clearing the KV cache");
  check(cudaMemset(work.get(), 0, places.bytes), "clearing the workspace");
  std::vector<float2> table((size_t)kMaxContext * (kRotary / 2));
  for (size_t i = 0; i < table.size(); i++) {
    const float angle = (float)(i / (kRotary / 2)) * m::inv_freq[i % (kRotary / 2)];
    table[i] = make_float2(std::cos(angle) * m::rope_attention_factor, std::sin(angle) * m::rope_attention_factor);
  }
  check(cudaMemcpy(rope.get(), table.data(), table.size() * sizeof(float2), cudaMemcpyHostToDevice),
        "copying the RoPE table");
  const uint8_t* w = weights.get();
  uint8_t* a = work.get();
  params.dense = w + m::dense_at;
  params.head = w + m::head_at;
  params.experts = w + m::experts_at;
  params.routers = w + m::routers_at;
  params.embedding = (const uint16_t*)(w + m::embedding_at);
  params.norms = (const float*)(w + m::norms_at);
  params.expert_scales = (const float4*)(w + m::expert_scales_at);
  params.dense_scales = (const float*)(w + m::dense_scales_at);
  params.head_scales = (const float*)(w + m::head_scales_at);
  params.rope = rope.get();
  params.kv = kv.get();
  params.hidden = (uint16_t*)(a + places.hidden);
  params.router_input = (float*)(a + places.router_input);
  params.squares = (float*)(a + places.squares);
  params.qkv = (float*)(a + places.qkv);
  params.partial = (float*)(a + places.partial);
  params.partial_sums = (float2*)(a + places.partial_sums);
  params.attention = (uint16_t*)(a + places.attention);
  params.router_logits = (float*)(a + places.router_logits);
  params.swiglu = (uint16_t*)(a + places.swiglu);
  params.logits = logits();
  params.best = (float2*)(a + places.best);
  params.shared_token = (int32_t*)(a + places.shared_token);
  params.history = history();
  params.barrier = (uint32_t*)(a + places.barrier);
  params.report = (Report*)(a + places.report);
  params.experts_hit = (uint32_t*)(a + places.experts_hit);
  params.tiles_per_split = 2;
  params.dense_flight = 2;
  params.head_flight = kStepSlots;
  if constexpr (kReceiveWords > 0)
    check(cudaMemset(a + places.receive, 0xFF, kReceiveWords * sizeof(uint32_t)), "emptying the receive memory");
  check(cudaDeviceSynchronize(), "setting the model up");
}

inline mk_model::mk_model(const void* const* blobs, const mk::Placement& placement, int context, double wait_limit_s,
                          bool looped)
    : RankState(blobs[0], placement.device, !placement.alone()),
      context(context),
      wait_limit_s(wait_limit_s),
      looped(looped),
      placement(placement),
      works(mk::kRanks) {
  using namespace mk;
  devices.push_back({device, stream, {this}});
  for (int r = 1; r < placement.count && !looped; r++) {
    const int on = device + r / placement.per_device;
    check(cudaSetDevice(on), "turning to a GPU");
    if (on != devices.back().device) {
      streams.push_back(std::make_unique<HostStream>());
      devices.push_back({on, *streams.back(), {}});
    }
    others.push_back(std::make_unique<RankState>(blobs[r], on, !placement.alone()));
    devices.back().ranks.push_back(others.back().get());
  }
  if (devices.size() > 1) allow_peers((int)devices.size());
  each_rank([&](RankState& r, int rank, cudaStream_t) {
    works[rank] = r.work.get();
    r.params.mail = mail.device();
    r.params.wait_limit_ns = (uint64_t)(std::min(wait_limit_s, 1e9) * 1e9);
    r.params.max_length = context;
  });
  if (looped)
    loop_back<RankState>(*this);
  else
    each_rank([&](RankState& r, int rank, cudaStream_t) { mk::connect(r, rank, works); });
}

inline void mk_model::copy_logits(int row, float* to) {
  using namespace mk;
  if (looped) std::fill_n(to, kVocab, 0.f);
  for (int rank = 0; rank < kRanks; rank++) {
    const int first = std::min(kVocab, rank * kHeadRows), rows = std::min(kVocab, first + kHeadRows) - first;
    if (rows && works[rank])
      check(cudaMemcpy(to + first, (float*)(works[rank] + places.logits) + (size_t)row * kModelHeadRows + first,
                       rows * sizeof(float), cudaMemcpyDeviceToHost),
            "copying logits from the GPU");
  }
}

inline mk::Sampling sampling_of(const mk_request& r) {
  return {r.temperature, r.top_p, r.min_p, r.repetition_penalty, r.top_k, r.seed};
}

inline void mk_model::launch(int given, int new_tokens, int made, int num_logits, const mk_request* request) {
  using namespace mk;
  const auto params_of = [&](const RankState& rank) {
    StepParams p = rank.params;
    count_exchanges(p, exchanges);
    p.taps = params.taps;  // every rank writes its rows
    p.barrier_base = arrivals;
    p.first_epoch = epochs;
    p.position = length;
    p.given = given;
    p.new_tokens = new_tokens;
    p.made = made;
    p.num_logits = num_logits;
    if (request) {
      p.num_stop_tokens = request->num_stop_tokens;
      std::copy_n(request->stop_tokens, request->num_stop_tokens, p.stop_tokens);
      p.sampling = sampling_of(*request);
    }
    return p;
  };
  uint32_t zero = 0;
  const bool wide = std::min(given, kStepTokens) > 8;
  const bool drawn = request && !is_greedy(sampling_of(*request));
  const auto kernel = wide ? drawn ? step_kernel<2, true> : step_kernel<2, false>
                           : drawn ? step_kernel<1, true> : step_kernel<1, false>;
  for (const DeviceRanks& d : devices) {
    if constexpr (kRanks > 1) check(cudaSetDevice(d.device), "turning to a GPU");
    LaunchParams p{};
    for (size_t i = 0; i < d.ranks.size(); i++) params_in(p, i) = params_of(*d.ranks[i]);
    void* args[] = {&p, &zero};
    check(cudaLaunchCooperativeKernel(kernel, dim3((unsigned)(kGrid * d.ranks.size())), dim3(kThreads), args,
                                      sizeof(StepShared), d.stream),
          "launching the kernel");
  }
  if constexpr (kRanks > 1) check(cudaSetDevice(device), "turning to the first GPU");
}

template <bool kFast>
void mk_model::launch_decode(int new_tokens, int made, const mk_request& request) {
  using namespace mk;
  if constexpr (kFast) {
    DecodeParams p{};
    p.dense = params.dense;
    p.head = params.head;
    p.experts = params.experts;
    p.routers = params.routers;
    p.embedding = params.embedding;
    p.norms = params.norms;
    p.expert_scales = params.expert_scales;
    p.dense_scales = params.dense_scales;
    p.head_scales = params.head_scales;
    p.rope = params.rope;
    p.kv = params.kv;
    p.exchange = (uint64_t*)(work.get() + places.exchange);
    p.epochs = (uint32_t*)(work.get() + places.epochs);
    p.logits = params.logits;
    p.history = params.history;
    p.report = params.report;
    p.mail = params.mail;
    p.wait_limit_ns = params.wait_limit_ns;
    p.trace = params.trace;
    p.streams = params.streams;
    p.trace_mask = params.trace_mask;
    p.mute = -1;
    p.steps = std::min(new_tokens, context - length);
    p.position = length;
    p.made = made;
    for (int i = 0; i < 2; i++) p.more_splits[i] = splits_fit(kMinLogSplits + i + 1) ? kMoreSplits[i] : INT32_MAX;
    p.num_stop_tokens = request.num_stop_tokens;
    std::copy_n(request.stop_tokens, request.num_stop_tokens, p.stop_tokens);
    p.sampling = sampling_of(request);
    p.qkv_flight = 2;
    p.dense_flight = 2;
    p.head_flight = 4;
    p.expert_flight = kExpertSlots;
    p.prefetch = 1;
    // Epochs and phases count progress in 32 bits.
    if (epochs > UINT32_MAX / kPhases - (uint64_t)kLayers * (p.steps + 1)) {
      check(cudaMemsetAsync(p.exchange, 0, kExchangeWords * sizeof(uint64_t), stream), "clearing the exchange buffers");
      epochs = 0;
    }
    p.first_epoch = epochs;
    uint32_t zero = 0;
    void* args[] = {&p, &zero};
    check(cudaLaunchCooperativeKernel(is_greedy(p.sampling) ? decode_kernel<kTraced, false> : decode_kernel<kTraced, true>,
                                      dim3(kGrid), dim3(kThreads), args, sizeof(DecodeShared), stream),
          "launching the kernel");
  }
}

inline void mk_model::finish() {
  using namespace mk;
  std::vector<Report> reports(kRanks);
  each_rank([&](RankState& r, int rank, cudaStream_t stream) {
    check(cudaMemcpyAsync(&reports[rank], r.params.report, sizeof(Report), cudaMemcpyDeviceToHost, stream),
          "copying the report from the GPU");
  });
  check(cudaMemcpyAsync(&arrivals, params.barrier, sizeof arrivals, cudaMemcpyDeviceToHost, stream),
        "copying the barrier's count from the GPU");
  check(cudaMemcpyAsync(&epochs, work.get() + places.epochs, sizeof epochs, cudaMemcpyDeviceToHost, stream),
        "copying the epochs from the GPU");
  if constexpr (kExchangeFlags && kRanks > 1) {  // another rank's to the first one here
    const size_t other = placement.first == 0 ? 1 : 0;
    check(cudaMemcpyAsync(&exchanges, work.get() + places.sent + other * sizeof(uint32_t), sizeof exchanges,
                          cudaMemcpyDeviceToHost, stream),
          "copying the count of exchanges from the GPU");
  }
  for (const DeviceRanks& d : devices) check(cudaStreamSynchronize(d.stream), "running the kernel");
  exchanges /= kGrid;  // every block counts
  const int gave_up = placement.alone() ? -1 : ask_others(reports);
  // A rank that waited for nobody else says more than those that waited for it.
  int first = -1;
  for (int rank = 0; rank < kRanks; rank++)
    if (reports[rank].expired && (first < 0 || (reports[first].peer && !reports[rank].peer))) first = rank;
  if (first >= 0) throw Failure(MK_ERR_TIMEOUT, describe(reports[first], wait_limit_s, first));
  if (gave_up >= 0)
    throw Failure(MK_ERR_TIMEOUT, "rank " + std::to_string(gave_up) + " gave up a wait; load the model again");
}

inline int32_t mk_model::await_token(int i) {
  using namespace mk;
  const volatile int32_t& token = ((volatile int32_t*)mail->tokens)[i];
  for (int spins = 1; token == 0; spins++) {
    if (spins % 64) continue;
    const cudaError_t state = cudaStreamQuery(stream);
    if (state == cudaErrorNotReady) {
      std::this_thread::sleep_for(std::chrono::microseconds(10));
      continue;
    }
    check(state, "running the kernel");
    break;
  }
  return token - 1;
}
