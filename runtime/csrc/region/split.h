// Records ops of a pending region again, from the root of the trie.
#pragma once

#include "record/recorder.h"

namespace torchtpu {

// A pending op's arguments with the numbers that this call handed to them, which begin at `floats` and `ints`.
std::vector<ArgKey> call_of(const Node& node, const double*& floats, const int64_t*& ints);
// Records at r.at the op that `old` stands for; `call` are its arguments, with r's numbers of their values.
void record_again(Recorder& r, const Node& old, std::vector<ArgKey> call);

}  // namespace torchtpu
