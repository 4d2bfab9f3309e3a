// Addresses of storages: numbers that no pointer may follow, in ranges of their own, from which a storage is found
// again.
//
// Every address lies in [2^56 + 2^55, 2^57).  On x86-64 that is not canonical, with four or with five levels of page
// tables, so that reading there faults and no memory is ever mapped there.  On aarch64 the top byte may be ignored, and
// bit 55 says that the rest belongs to the kernel, which no process may read.
//
// The range has a part for each power of two, which holds places of that many bytes: a storage takes the smallest place
// that its bytes fit in, so that no two storages' bytes overlap.  A place that is given back is taken again first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchtpu {

struct TpuStorage;

// All under state_lock.
// A free range of `nbytes` for the storage; 0 where there is none, which takes bytes by the hundred tebibytes.
uint64_t take_address(TpuStorage* storage, size_t nbytes);
void give_back_address(uint64_t address);  // one that take_address gave; 0 is none
// Whether a storage at the address may have so many bytes.
bool has_room_for(uint64_t address, size_t nbytes);
// The storage whose place this address lies in; null where there is none.
TpuStorage* find_storage(uint64_t address);
std::vector<TpuStorage*> storages_with_address();

}  // namespace torchtpu
