// Records ops of a pending region again, from the root of the trie.
#pragma once

#include "record/recorder.h"

namespace torchtpu {

// A pending op's arguments with the numbers that this call handed to them, which begin at `floats` and `ints`.
std::vector<ArgKey> call_of(const Node& node, const double*& floats, const int64_t*& ints);
// Records at r.at the op that `old` stands for; `call` are its arguments, with r's numbers of their values.
void record_again(Recorder& r, const Node& old, std::vector<ArgKey> call);

// The ends of the runs of ops that stay the same where an op stream comes with other shapes, and of those between them,
// but the last; none where the runs are too few to be worth it.
std::vector<int64_t> ends_of_runs(std::vector<bool> is_same);

}  // namespace torchtpu
