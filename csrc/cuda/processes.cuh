// Ranks in several processes: each knows its own; the others' workspaces are opened through CUDA IPC, so that kernels write
// there as they would in one process. docs/TENSOR_PARALLEL.md, "Ranks in several processes".
#pragma once
#include "state.cuh"

inline void mk_model::addresses(uint8_t* to) {
  using namespace mk;
  each_rank([&](RankState& r, int rank, cudaStream_t) {
    RankAddress a{kernel_number(), shared_bytes(r.places), rank, 0, {}};
    check(cudaIpcGetMemHandle(&a.work, r.work.get()), "offering GPU memory to other processes");
    memset(to, 0, MK_ADDRESS_BYTES);
    memcpy(to, &a, sizeof a);
    to += MK_ADDRESS_BYTES;
  });
}

inline void mk_model::connect(const uint8_t* addresses) {
  using namespace mk;
  disconnect();
  std::vector<std::unique_ptr<PeerMemory>> found;
  for (int rank = 0; rank < kRanks; rank++) {
    if (here(rank)) continue;
    found.push_back(std::make_unique<PeerMemory>(addresses + rank * MK_ADDRESS_BYTES, rank, shared_bytes(places)));
    works[rank] = found.back()->get();
  }
  each_rank([&](RankState& r, int rank, cudaStream_t) { mk::connect(r, rank, works); });
  opened = std::move(found);
}

inline void mk_model::disconnect() {
  opened.clear();
  for (int rank = 0; rank < mk::kRanks; rank++)
    if (!here(rank)) works[rank] = nullptr;
}

inline void mk_model::await_others() {
  using namespace mk;
  using clock = std::chrono::steady_clock;
  // The last that a block does in a launch is to come to a barrier of its rank's grid, with everything it wrote before. The
  // grids are alike, so that the counts are. A rank may have begun the next step, but not its logits: they need this rank.
  const auto until = clock::now() + std::chrono::duration<double>(std::min(wait_limit_s, 1e9));
  for (int rank = 0; rank < kRanks && !placement.alone(); rank++) {
    if (here(rank)) continue;
    const auto behind = [&] {
      uint32_t count = 0;
      check(cudaMemcpy(&count, works[rank] + places.barrier, sizeof count, cudaMemcpyDeviceToHost),
            "reading the count of another rank's barrier");
      return (int32_t)(count - arrivals) < 0;
    };
    while (behind())
      if (clock::now() > until)
        throw Failure(MK_ERR_TIMEOUT, "rank " + std::to_string(rank) + " did not end the step that the others did");
  }
}

inline int mk_model::ask_others(std::vector<mk::Report>& reports) {
  using namespace mk;
  int gave_up = -1;
  each_rank([&](RankState&, int rank, cudaStream_t) {
    if (reports[rank].abandoned) gave_up = (int)reports[rank].abandoned - 1;
    if (reports[rank].expired) gave_up = rank;
  });
  // What a process that ended left cannot always be read; what there is says enough then.
  for (int rank = 0; rank < kRanks && gave_up >= 0; rank++)
    if (!here(rank) &&
        cudaMemcpy(&reports[rank], works[rank] + places.report, sizeof(Report), cudaMemcpyDeviceToHost) != cudaSuccess) {
      cudaGetLastError();
      reports[rank] = {};
    }
  return gave_up;
}

inline void mk_model::mark_tokens(int first, int count) {
  mk::check(cudaMemsetAsync(history() + first, 0xFF, count * sizeof(int32_t), stream), "marking the tokens to come");
}
inline std::vector<int32_t> mk_model::chosen_tokens(int first, int count) {
  std::vector<int32_t> found(count);
  mk::check(cudaMemcpy(found.data(), history() + first, count * sizeof(int32_t), cudaMemcpyDeviceToHost),
            "copying tokens from the GPU");
  found.resize(std::find(found.begin(), found.end(), -1) - found.begin());
  return found;
}

// ---- a generation ----------------------------------------------------------------------------------------------------
inline bool is_stop(const mk_request& r, int32_t token) {
  return std::find(r.stop_tokens, r.stop_tokens + r.num_stop_tokens, token) != r.stop_tokens + r.num_stop_tokens;
}

// Why a generation ends with its i-th token, or -1; of a prompt that `end` positions are taken with.
inline int32_t reason_to_stop(const mk_model* model, const mk_request& r, int end, int i, int32_t token, bool cancelled) {
  if (is_stop(r, token)) return MK_STOP_TOKEN;
  if (cancelled) return MK_STOP_CANCELLED;
  if (i + 1 >= r.max_new_tokens) return MK_STOP_LENGTH;
  return end + i >= model->context ? MK_STOP_CONTEXT : -1;
}

// A generation in a process without rank 0: the same launches, whose tokens the host looks for when they have ended. It does not
// know whether the generation is cancelled; so then too there is the second launch, in which the ranks tell each other.
inline void follow(mk_model* model, const int32_t* prompt, int32_t num_prompt, const mk_request& r,
                   mk_token_callback callback, void* user, mk_result* result) {
  const int end = model->length + num_prompt, most = std::min(r.max_new_tokens, model->context - end + 1);
  model->give(prompt, num_prompt);
  model->mark_tokens(end, most);
  model->launch(num_prompt, 1, 0, 0, &r);
  model->finish();
  model->length = end;
  std::vector<int32_t> tokens = model->chosen_tokens(end, 1);
  if (!tokens.empty() && reason_to_stop(model, r, end, 0, tokens[0], false) < 0) {
    model->launch(1, r.max_new_tokens - 1, 1, 0, &r);
    model->finish();
    tokens = model->chosen_tokens(end, most);
  }
  const int count = (int)tokens.size();
  result->num_new_tokens = count;
  if (count) {
    const int32_t reason = reason_to_stop(model, r, end, count - 1, tokens[count - 1], false);
    result->stop_reason = reason < 0 ? (int32_t)MK_STOP_CANCELLED : reason;
    model->length = end + count - 1;
  }
  for (int i = 0; callback && i < count; i++) callback(user, tokens[i]);
}
