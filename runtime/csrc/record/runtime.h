// What all threads share beside the devices' arrays, the trie and the queue: one object of static storage, so that a
// field is read without an indirection.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

namespace torchtpu {

struct Limits {
  std::atomic<int64_t> max_ops{2048}, max_bytes{int64_t{1} << 37}, max_in_flight{32}, max_nodes{200000},
      max_plans{1024};
};

struct Policy {
  std::atomic<bool> is_frozen{false};  // programs that exist serve, or none
  std::atomic<bool> is_exact{false};   // a program serves only what it was made for, whatever came before
  std::atomic<bool> gives_room{true};  // programs are made for arrays longer than what counts, where sizes grow
};

struct Counters {  // guarded by state_lock
  int64_t hits = 0, misses = 0, regions = 0, subgraphs = 0, forgotten = 0;
  std::map<std::string, int64_t> cuts;  // by reason
};

enum class Process : uint8_t { kRuns, kForked, kEnds };

struct Runtime {
  std::atomic<Process> process{Process::kRuns};
  std::atomic<bool> is_synchronous{false};  // each op is launched, and waited for, as it is recorded
  std::atomic<int> num_threads{0};          // that have recorded and not ended
  Limits limits;
  Policy policy;
  Counters counters;
};
extern Runtime runtime;

}  // namespace torchtpu
