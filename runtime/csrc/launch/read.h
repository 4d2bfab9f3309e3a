// Reading a tensor's values to the host.
#pragma once

#include "record/recorder.h"

namespace torchtpu {

// A read that has begun: the value is on its way, whatever the tensor is changed to meanwhile.  Any thread may wait.
class Reading {
 public:
  explicit Reading(const at::Tensor& t, bool may_read_beside = true);
  Reading(const Reading&) = delete;
  ~Reading();
  // False where a subgraph could not be computed: a read that ends the region says why.  Waits for it.
  bool is_sound() const;
  // A host tensor with the sizes, strides and values that the tensor had; raises the error that kept them from being.
  at::Tensor wait() const;

 private:
  at::Tensor host_value() const;

  at::TensorOptions options_;
  bool is_conj_, is_neg_;
  std::vector<int64_t> sizes_, strides_;
  int64_t offset_ = 0;
  ReadValue value_;
  double started_ = 0;  // of an observed read
  std::string line_;
};

// The calling thread is told of an error that a reading has raised for it in another thread.
void end_raised_transactions();

}  // namespace torchtpu
