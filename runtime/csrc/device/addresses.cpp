#include "device/addresses.h"

#include <algorithm>
#include <array>
#include <bit>

#include "device/locks.h"

namespace torchtpu {

namespace {

constexpr uint64_t kFirst = (uint64_t{1} << 56) + (uint64_t{1} << 55);
constexpr int kPartBits = 49;      // 64 parts of 2^49 bytes, of which those of too small places stay unused
constexpr int kSmallestPlace = 9;  // 512 bytes, the alignment of CUDA's allocator

// The places of 2^bits bytes.
struct Part {
  std::vector<TpuStorage*> storages;  // by place; null where it is free
  std::vector<uint32_t> free;         // the places given back, the latest last
};
// Lives until the process ends: storages die after static destructors have run.
auto& parts = *new std::array<Part, kPartBits + 1>();

int bits_for(size_t nbytes) {
  return nbytes <= 1 ? kSmallestPlace : std::max(kSmallestPlace, static_cast<int>(std::bit_width(nbytes - 1)));
}
int bits_of(uint64_t address) { return static_cast<int>((address - kFirst) >> kPartBits); }
uint32_t place_of(uint64_t address) {
  return static_cast<uint32_t>(((address - kFirst) & ((uint64_t{1} << kPartBits) - 1)) >> bits_of(address));
}

}  // namespace

uint64_t take_address(TpuStorage* storage, size_t nbytes) {
  state_lock.assert_held();
  int bits = bits_for(nbytes);
  if (bits > kPartBits) return 0;
  Part& part = parts[bits];
  uint32_t place;
  if (!part.free.empty()) {
    place = part.free.back();
    part.free.pop_back();
    part.storages[place] = storage;
  } else {
    uint64_t most = std::min(uint64_t{1} << (kPartBits - bits), uint64_t{UINT32_MAX});
    if (part.storages.size() >= most) return 0;
    place = static_cast<uint32_t>(part.storages.size());
    part.storages.push_back(storage);
  }
  return kFirst + (static_cast<uint64_t>(bits) << kPartBits) + (static_cast<uint64_t>(place) << bits);
}

void give_back_address(uint64_t address) {
  state_lock.assert_held();
  if (!address) return;
  Part& part = parts[bits_of(address)];
  part.storages[place_of(address)] = nullptr;
  part.free.push_back(place_of(address));
}

bool has_room_for(uint64_t address, size_t nbytes) { return address && bits_for(nbytes) <= bits_of(address); }

TpuStorage* find_storage(uint64_t address) {
  state_lock.assert_held();
  bool is_ours = address >= kFirst && bits_of(address) >= kSmallestPlace && bits_of(address) <= kPartBits;
  if (!is_ours) return nullptr;
  const auto& storages = parts[bits_of(address)].storages;
  uint32_t place = place_of(address);
  return place < storages.size() ? storages[place] : nullptr;
}

std::vector<TpuStorage*> storages_with_address() {
  state_lock.assert_held();
  std::vector<TpuStorage*> found;
  for (const Part& part : parts) {
    std::copy_if(part.storages.begin(), part.storages.end(), std::back_inserter(found), [](auto* s) { return s; });
  }
  return found;
}

}  // namespace torchtpu
