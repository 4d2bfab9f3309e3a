// Finds the laps of a loop in a pending region.
#pragma once

#include <vector>

#include "record/trie.h"

namespace torchtpu {

// The ops [begin, end) of a path are laps of `period` ops.
struct Laps {
  size_t begin = 0, end = 0, period = 0;
};
// The longest run of so many laps at least, without the first lap of a loop that takes what it made; empty where there
// is none.
Laps find_laps(const std::vector<const Node*>& path, size_t fewest);
// Whether most ops of a path are laps of one loop, which have programs of their own wherever a region of them ends.
bool is_loop(const std::vector<const Node*>& path);
// Where the last whole lap ends, counted from the root, in a region that is laps of a loop from its first op on to
// `last`; else null.
Node* end_of_laps(Node* last);

}  // namespace torchtpu
