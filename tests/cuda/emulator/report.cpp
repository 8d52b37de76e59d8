// What was wrong, and where every lane of every block is: on stderr, then the process ends.
#include <dlfcn.h>
#include <signal.h>
#include <sys/time.h>
#include <ucontext.h>
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>
#include "machine.h"

extern "C" __attribute__((weak, visibility("hidden"))) const char emulator_image[];

namespace emulator {

std::string source(const void* site) {
  Dl_info at;
  if (!site || !dladdr(site, &at)) return "";
  char command[4096];
  const char* image = emulator_image ? emulator_image : at.dli_fname;
  snprintf(command, sizeof command, "addr2line -Cfpis -e '%s' 0x%lx 2>/dev/null", image,
           (unsigned long)((const char*)site - (const char*)at.dli_fbase - 1));
  std::string text;
  if (FILE* f = popen(command, "r")) {
    char line[1024];
    while (fgets(line, sizeof line, f)) {
      std::string s = line;
      s.erase(s.find_last_not_of("\n") + 1);
      if (const size_t p = s.find(" (inlined by) "); p == 0) s.erase(0, 14);
      const size_t arguments = s.find('('), end = s.rfind(" at ");
      if (arguments < end && end != s.npos) s.erase(arguments, end - arguments);
      text += (text.empty() ? "" : " <- ") + s;
    }
    pclose(f);
  }
  char raw[64];
  snprintf(raw, sizeof raw, "%p", site);
  return text.empty() ? raw : text;
}

namespace {

std::string detail(const Block& b, const Doing& d, State state) {
  char text[160] = "";
  const std::string what = d.what;
  if (what == "mbarrier wait" && d.barrier < kSharedBase + machine.shared_bytes) {
    const uint32_t at = d.barrier - kSharedBase;
    const Mbarrier& m = *(const Mbarrier*)(b.shared + at);
    snprintf(text, sizeof text,
             " for parity %u of the one at byte %u (phase %u, %u of %u arrivals and %ld bytes missing)",
             d.detail, at, (unsigned)m.phase, (unsigned)m.pending, (unsigned)m.expected, (long)m.bytes);
  } else if (what == "bar.sync" || what == "bar.arrive") {
    snprintf(text, sizeof text, " %u (%u of %u threads there)", d.barrier, b.barriers[d.barrier].arrived,
             d.detail ? d.detail : 32u * (unsigned)b.live_warps);
  } else if (state == State::meeting) {
    snprintf(text, sizeof text, " of lanes %08x", d.mask);
  }
  return text;
}

// What the warps of a block do, a line for each thing. sites: numbers of the places, filled here.
std::string describe(const Block& b, std::vector<const void*>& sites) {
  using Key = std::pair<std::string, const void*>;
  std::vector<std::pair<Key, std::string>> rows;  // and which warps do it
  for (const Warp& w : b.warps) {
    std::map<Key, uint32_t> groups;
    for (const Lane& l : w.lanes) {
      const char* state = l.state == State::ready ? " (runs)" : l.state == State::meeting ? " (waits for lanes)" : "";
      groups[{l.doing.what + detail(b, l.doing, l.state) + state, l.doing.site}] |= 1u << l.index;
    }
    for (const auto& [key, lanes] : groups) {
      char mask[16] = "";
      if (lanes != w.exists) snprintf(mask, sizeof mask, ":%08x", lanes);
      auto row = std::find_if(rows.begin(), rows.end(), [&, &k = key](const auto& r) { return r.first == k; });
      if (row == rows.end()) row = rows.insert(row, {key, ""});
      row->second += " " + std::to_string(w.index) + mask;
    }
  }
  std::string text;
  for (const auto& [key, who] : rows) {
    text += "  warps" + who + ": " + key.first;
    if (key.second) {
      auto site = std::find(sites.begin(), sites.end(), key.second);
      if (site == sites.end()) site = sites.insert(site, key.second);
      text += " [" + std::to_string(site - sites.begin() + 1) + "]";
    }
    text += "\n";
  }
  return text;
}

void print_blocks() {
  std::vector<const void*> sites;
  std::vector<std::pair<std::string, std::string>> groups;  // blocks in one state together
  for (const Block& b : machine.blocks) {
    const std::string text = describe(b, sites);
    auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == text; });
    if (group == groups.end()) group = groups.insert(group, {text, "block"});
    group->second += " " + std::to_string(b.index);
  }
  for (const auto& [text, who] : groups) fprintf(stderr, "%s\n%s", who.c_str(), text.c_str());
  for (size_t i = 0; i < sites.size(); i++) fprintf(stderr, "[%zu] %s\n", i + 1, source(sites[i]).c_str());
}

[[noreturn]] void report(const std::string& text, const void* site) {
  signal(SIGSEGV, SIG_DFL);
  signal(SIGBUS, SIG_DFL);
  signal(SIGVTALRM, SIG_IGN);
  fprintf(stderr, "emulator: %s\n", text.c_str());
  fprintf(stderr, "turn %lu, last change in turn %lu, %d copies and stores under way, kernel %s\n", machine.turn,
          machine.last_progress, machine.pending, source((const char*)machine.kernel + 1).c_str());
  if (const Lane* l = machine.running)
    fprintf(stderr, "running: block %d, warp %d, lane %d, last in %s: %s\n", l->warp->block->index, l->warp->index,
            l->index, l->doing.what, source(l->doing.site).c_str());
  if (site) fprintf(stderr, "at %s\n", source(site).c_str());
  print_blocks();
  fflush(stderr);
  abort();
}

uint64_t seen_turn;
int seen_times, patience;  // seconds
struct sigaction before[3];
constexpr int kSignals[3] = {SIGSEGV, SIGBUS, SIGVTALRM};
uint8_t signal_stack[256 << 10];
stack_t stack_before;
itimerval timer_before;

const void* program_counter(void* context) {
#if defined(__x86_64__)
  return (const void*)(((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP] + 1);
#else
  return (const void*)(((ucontext_t*)context)->uc_mcontext.pc + 1);
#endif
}

void on_signal(int number, siginfo_t* info, void* context) {
  if (number == SIGVTALRM) {  // every second of this process's own time
    seen_times = machine.turn == seen_turn ? seen_times + 1 : 0;
    seen_turn = machine.turn;
    if (seen_times < patience) return;
    report("a lane runs without giving way: a loop that polls must go through a function that does",
           program_counter(context));
  }
  const uint8_t* p = (const uint8_t*)info->si_addr;
  char address[32];
  snprintf(address, sizeof address, "%p", info->si_addr);
  std::string message = std::string("an access to ") + address + nearest_allocation(p);
  if (const Lane* l = machine.running) {
    const uint8_t* shared = l->warp->block->shared;
    if (p < l->fiber.stack && p + (64 << 10) >= l->fiber.stack)
      message = "the stack of a lane is full";
    else if (p >= shared && p < shared + machine.shared_bytes + 4096)
      message = "an access to byte " + std::to_string(p - shared) + " of " + std::to_string(machine.shared_bytes) +
                " bytes of shared memory";
  }
  report(message, program_counter(context));
}

}  // namespace

void fail(const char* format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  report(text, nullptr);
}

Guard::Guard() {
  stack_t own{};
  own.ss_sp = signal_stack;
  own.ss_size = sizeof signal_stack;
  sigaltstack(&own, &stack_before);
  struct sigaction action {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  seen_times = 0;
  const char* seconds = getenv("MK_EMULATOR_ALONE");
  patience = seconds ? atoi(seconds) : 20;
  for (int i = 0; i < 3; i++) sigaction(kSignals[i], &action, &before[i]);
  const itimerval second{{1, 0}, {1, 0}};
  setitimer(ITIMER_VIRTUAL, &second, &timer_before);
}
Guard::~Guard() {
  setitimer(ITIMER_VIRTUAL, &timer_before, nullptr);
  for (int i = 0; i < 3; i++) sigaction(kSignals[i], &before[i], nullptr);
  sigaltstack(&stack_before, nullptr);
}

}  // namespace emulator
