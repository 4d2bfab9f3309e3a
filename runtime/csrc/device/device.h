// What makes PrivateUse1 a device: the guard with its streams and events, the hooks, pinned memory, the random number
// generators, and the numbers (seed, offset) that an op draws from.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/GeneratorImpl.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace torchtpu {

// A counter-based generator: its whole state is a seed and the offset of the next unused counter.  Ops draw from it
// under state_lock, so that its state is guarded by random_lock, and its mutex by nobody here.
class TpuGenerator final : public c10::GeneratorImpl {
 public:
  explicit TpuGenerator(c10::DeviceIndex device);

  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& new_state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& new_state) override;
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override;

  // The counter before the draw; the next draw starts at least `increment` counters later.
  std::pair<uint64_t, uint64_t> advance(uint64_t increment);
  // Back to a counter from before a draw.
  void rewind(uint64_t seed, uint64_t offset) { set_counter({seed, offset}); }

 private:
  struct Counter {
    uint64_t seed = c10::default_rng_seed_val;  // the key of every draw
    uint64_t offset = 0;                        // the first counter that no op has drawn from; a multiple of 4
  };
  struct State : c10::intrusive_ptr_target {
    Counter counter;
  };

  TpuGenerator* clone_impl() const override;
  Counter counter() const;
  void set_counter(Counter counter);
  c10::intrusive_ptr<State> state() const;

  c10::intrusive_ptr<State> state_;  // shared by generators tied by graphsafe_set_state; random_lock guards it and it
};

// The number of devices; set once at import, before the first tensor.
c10::DeviceIndex device_count() noexcept;
c10::DeviceIndex current_device() noexcept;

// What an op draws from.
struct Draw {
  at::Generator generator;
  uint64_t seed, offset;
};
// Taken from `generator` or else from the default generator of `device`.  Raises PyTorch's error when the generator
// belongs to another device type.
Draw next_philox(const std::optional<at::Generator>& generator, c10::DeviceIndex device, uint64_t increment);
// Draws that did not happen, in their order: the generators are as they were before them.
void take_back(const std::vector<Draw>& draws);

// Adds the helpers that torchtpu/api/device.py needs to the extension module.
void bind_device(pybind11::module& m);

}  // namespace torchtpu
