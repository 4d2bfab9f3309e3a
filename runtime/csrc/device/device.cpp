#include "device/device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "record/recorder.h"

namespace py = pybind11;

namespace torchtpu {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kTpu = c10::DeviceType::PrivateUse1;

// ---- the current device and the current streams -------------------------------------------------------------------

DeviceIndex count_from_environment() {
  const char* text = std::getenv("TORCHTPU_NUM_DEVICES");
  return static_cast<DeviceIndex>(text == nullptr ? 1
                                                  : std::clamp(std::strtol(text, nullptr, 10), 1L, long{kMaxDevices}));
}

std::atomic<DeviceIndex> number_of_devices{count_from_environment()};
thread_local DeviceIndex this_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> this_stream{};  // per device; 0 is the default stream
std::atomic<c10::StreamId> last_stream{0};

DeviceIndex checked(DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < number_of_devices, "The device index is out of range. It must be in [0, ",
              static_cast<int>(number_of_devices.load()), "), but got ", static_cast<int>(device), ".");
  return device;
}

DeviceIndex or_current(DeviceIndex device) { return device < 0 ? this_device : checked(device); }

DeviceIndex exchange(DeviceIndex device) {
  return device < 0 ? this_device : std::exchange(this_device, checked(device));
}

// ---- the guard: streams are ordered tokens, for ops run in program order on every stream ---------------------------

struct Event {
  DeviceIndex device;  // where it was recorded
  int64_t marker;      // the recorder's marker, or kUntimed
  static constexpr int64_t kUntimed = -1;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kTpu; }
  Device exchangeDevice(Device device) const override { return Device(kTpu, exchange(device.index())); }
  Device getDevice() const override { return Device(kTpu, this_device); }
  void setDevice(Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) this_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return number_of_devices; }

  Stream getStream(Device device) const override {
    const DeviceIndex index = or_current(device.index());
    return Stream(Stream::UNSAFE, Device(kTpu, index), this_stream[index]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(kTpu, or_current(device.index())));
  }
  Stream getNewStream(Device device, int) const override {
    return Stream(Stream::UNSAFE, Device(kTpu, or_current(device.index())), ++last_stream);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const DeviceIndex index = or_current(stream.device_index());
    return Stream(Stream::UNSAFE, Device(kTpu, index), std::exchange(this_stream[index], stream.id()));
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& stream) const override { synchronize(or_current(stream.device_index())); }
  void synchronizeDevice(const DeviceIndex device) const override { synchronize(or_current(device)); }

  // A timing event holds a marker of the recorder; any other event stands for everything recorded so far.
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new Event{};
    const DeviceIndex device = or_current(stream.device_index());
    const bool timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    *static_cast<Event*>(*event) = {device, timed ? record_marker(device) : Event::kUntimed};
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void* event) const override {
    const auto* e = static_cast<Event*>(event);
    return e == nullptr || e->marker == Event::kUntimed || marker_time(e->marker) >= 0;
  }
  void synchronizeEvent(void* event) const override {
    const auto* e = static_cast<Event*>(event);
    if (e == nullptr) return;
    e->marker == Event::kUntimed ? synchronize(e->device) : wait_marker(e->marker);
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    return 1e3 * (marker_time(static_cast<Event*>(end)->marker) - marker_time(static_cast<Event*>(start)->marker));
  }

  c10::DeviceCapability getDeviceCapability(Device) const override {
    c10::DeviceCapability capability;
    capability.capability_data.capability_bits = 0;
    for (const auto index :
         {c10::kIndex_Byte, c10::kIndex_Char, c10::kIndex_Short, c10::kIndex_Int, c10::kIndex_Long, c10::kIndex_Half,
          c10::kIndex_Float, c10::kIndex_Double, c10::kIndex_ComplexFloat, c10::kIndex_ComplexDouble, c10::kIndex_Bool,
          c10::kIndex_BFloat16, c10::kIndex_Float8_e5m2, c10::kIndex_Float8_e4m3fn})
      capability.capability_data.capability_bits |= 1ULL << index;
    return capability;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- pinned host memory: ordinary memory that remembers being pinned ------------------------------------------------

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    auto block = std::make_unique<Block>(Block{c10::GetCPUAllocator()->allocate(nbytes), this});
    void* start = block->memory.get();
    if (start != nullptr) {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_[reinterpret_cast<uintptr_t>(start)] = reinterpret_cast<uintptr_t>(start) + nbytes;
    }
    return {start, block.release(), &release, Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }

  bool holds(const void* pointer) const {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    std::lock_guard<std::mutex> lock(mutex_);
    const auto after = ends_.upper_bound(address);
    return after != ends_.begin() && address < std::prev(after)->second;
  }

 private:
  struct Block {
    c10::DataPtr memory;     // what the CPU allocator returned
    PinnedAllocator* owner;  // never destroyed
  };

  static void release(void* context) {
    std::unique_ptr<Block> block(static_cast<Block*>(context));
    std::lock_guard<std::mutex> lock(block->owner->mutex_);
    block->owner->ends_.erase(reinterpret_cast<uintptr_t>(block->memory.get()));
  }

  mutable std::mutex mutex_;
  std::map<uintptr_t, uintptr_t> ends_;  // start of a live block -> its end; guarded by mutex_
};

PinnedAllocator& pinned_allocator() {
  static auto* allocator = new PinnedAllocator;  // outlives every tensor, also at exit
  return *allocator;
}

// ---- the hooks ------------------------------------------------------------------------------------------------------

const at::Generator& default_generator(DeviceIndex device) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (DeviceIndex i = 0; i < number_of_devices; ++i) made->push_back(at::make_generator<TpuGenerator>(i));
    return made;
  }();
  return generators->at(or_current(device));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return number_of_devices; }
  DeviceIndex getCurrentDevice() const override { return this_device; }
  void setCurrentDevice(DeviceIndex device) const override { this_device = checked(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return exchange(device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchange(device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<TpuGenerator>(or_current(device));
  }
  Device getDeviceFromPtr(void*) const override { return Device(kTpu, this_device); }
  bool isPinnedPtr(const void* data) const override { return pinned_allocator().holds(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), nbytes);
  }
};

[[maybe_unused]] const bool hooks_are_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);  // PyTorch keeps the pointer for ever
  return true;
}();

}  // namespace

DeviceIndex device_count() noexcept { return number_of_devices; }
DeviceIndex current_device() noexcept { return this_device; }

// ---- random numbers -------------------------------------------------------------------------------------------------

TpuGenerator::TpuGenerator(DeviceIndex device)
    : c10::GeneratorImpl(Device(kTpu, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      state_(c10::make_intrusive<State>()) {}

TpuGenerator::Counter TpuGenerator::counter() const {
  SpinGuard guard(random_lock);
  return state_->counter;
}

void TpuGenerator::set_counter(Counter counter) {
  SpinGuard guard(random_lock);
  state_->counter = counter;
}

void TpuGenerator::set_current_seed(uint64_t seed) { set_counter({seed, 0}); }
void TpuGenerator::set_offset(uint64_t offset) {
  SpinGuard guard(random_lock);
  state_->counter.offset = offset;
}
uint64_t TpuGenerator::get_offset() const { return counter().offset; }
uint64_t TpuGenerator::current_seed() const { return counter().seed; }

uint64_t TpuGenerator::seed() {
  uint64_t seed = c10::detail::getNonDeterministicRandom(/*is_cuda=*/true);
  set_current_seed(seed);
  return seed;
}

c10::intrusive_ptr<c10::TensorImpl> TpuGenerator::get_state() const {
  auto bytes = at::detail::empty_cpu({16}, at::kByte, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
  Counter now = counter();
  std::memcpy(bytes.data_ptr<uint8_t>(), &now.seed, 8);
  std::memcpy(bytes.data_ptr<uint8_t>() + 8, &now.offset, 8);
  return bytes.getIntrusivePtr();
}

void TpuGenerator::set_state(const c10::TensorImpl& new_state) {
  at::detail::check_rng_state(new_state);
  TORCH_CHECK(new_state.numel() == 16, "RNG state is wrong size: expected 16 bytes (seed, offset), got ",
              new_state.numel());
  const auto* bytes = static_cast<const uint8_t*>(new_state.data());
  Counter given;
  std::memcpy(&given.seed, bytes, 8);
  std::memcpy(&given.offset, bytes + 8, 8);
  set_counter(given);
}

c10::intrusive_ptr<TpuGenerator::State> TpuGenerator::state() const {
  SpinGuard guard(random_lock);
  return state_;
}

void TpuGenerator::graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& new_state) {
  auto* other = dynamic_cast<TpuGenerator*>(new_state.get());
  TORCH_CHECK(other != nullptr, "Expected a 'tpu' generator as the new state");
  auto state = other->state();
  SpinGuard guard(random_lock);
  state_.swap(state);
}

c10::intrusive_ptr<c10::GeneratorImpl> TpuGenerator::graphsafe_get_state() const {
  auto shared = c10::make_intrusive<TpuGenerator>(device_.index());
  shared->state_ = state();
  return shared;
}

TpuGenerator* TpuGenerator::clone_impl() const {
  auto* copy = new TpuGenerator(device_.index());
  copy->set_counter(counter());
  return copy;
}

std::pair<uint64_t, uint64_t> TpuGenerator::advance(uint64_t increment) {
  SpinGuard guard(random_lock);
  const uint64_t offset = state_->counter.offset;
  state_->counter.offset += (increment + 3) / 4 * 4;
  return {state_->counter.seed, offset};
}

Draw next_philox(const std::optional<at::Generator>& generator, DeviceIndex device, uint64_t increment) {
  const bool given = generator.has_value() && generator->defined();
  const at::Generator& source = given ? *generator : default_generator(device);
  auto [seed, offset] = at::check_generator<TpuGenerator>(source)->advance(increment);
  return {source, seed, offset};
}

void take_back(const std::vector<Draw>& draws) {
  for (auto draw = draws.rbegin(); draw != draws.rend(); ++draw) {
    at::check_generator<TpuGenerator>(draw->generator)->rewind(draw->seed, draw->offset);
  }
}

// ---- what torchtpu/api/device.py calls
// ----------------------------------------------------------------------------------

void bind_device(py::module& m) {
  m.def("device_count", [] { return static_cast<int>(device_count()); });
  m.def("set_device_count", [](long count) {
    TORCH_CHECK(count >= 1 && count <= kMaxDevices, "the number of devices must be in [1, ", kMaxDevices, "]");
    number_of_devices = static_cast<DeviceIndex>(count);
  });
  m.def("current_device", [] { return static_cast<int>(this_device); });
  m.def("set_device", [](DeviceIndex device) { this_device = checked(device); });
  m.def("exchange_device", [](DeviceIndex device) { return static_cast<int>(exchange(device)); });
  m.def("default_generator", [](DeviceIndex device) { return default_generator(device); });
}

}  // namespace torchtpu
