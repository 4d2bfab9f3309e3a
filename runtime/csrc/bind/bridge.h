// Calls from the recorder up into Python: the only door besides the engine's own callbacks.
#pragma once

#include "record/trie.h"

namespace torchtpu {

// A place in the user's code, which is named only where somebody asks.
class CodePlace {
 public:
  explicit CodePlace(PyObject* frame);  // takes over the reference; the GIL is held
  CodePlace(const CodePlace&) = delete;
  ~CodePlace();
  std::string line() const;  // "file:line"; takes the GIL

 private:
  PyObject* code_;
  int instruction_;
};
// The innermost user frame; null without one.  Takes the GIL.
std::shared_ptr<CodePlace> current_place();

// Replaces the arguments on the stack (meta tensors) by the results of the op's `infer` function.
void infer_in_python(const OpInfo& info, Stack* stack);
// The engine's answer to an op about to run on the CPU; raises where the user refuses fallbacks.
void report_fallback(const std::string& op, std::optional<at::ScalarType> dtype, int64_t nbytes);
at::Tensor download(PyObject* object);
PyObject* upload(const at::Tensor& host, c10::DeviceIndex device);          // new reference
PyObject* upload_by(PyObject* client, const at::Tensor& host, int device);  // the same; the GIL is held
void resolve_guard(PyObject* guard);
bool has_passed(PyObject* guard);  // waits for the guard's checks
void launch(const std::shared_ptr<struct Work>& work);
void plan(const std::shared_ptr<struct Plan>& plan);
// A read of `nbytes` on `line` began at `started` (steady clock) and took `seconds`; told while reads_are_observed.
void report_read(const std::string& line, double started, double seconds, int64_t nbytes);
extern std::atomic<bool> reads_are_observed;
// A thread has waited for `seconds`; the GIL is held.
void report_waiting(const std::string& what, double seconds);
// A wait that was reported is over, by whatever.  Takes the GIL.
void report_waited() noexcept;
void finish_device(c10::DeviceIndex device);
// "file:line" of the innermost user frame; "" without one.  Takes the GIL.
std::string current_line();
// Where set, what current_line() says: the line that a compiled graph's op was traced from.
extern thread_local const std::string* replayed_line;
// What turns dynamo's frame evaluation on and off.
void set_eval_frame_setter(PyObject* setter);
// Raises the stored exception.
[[noreturn]] void raise_stored(PyObject* error);
// Raises what PyErr_Occurred() says; the GIL is held.
[[noreturn]] void throw_python_error();
// Whether what is being caught is an exception of Python that is no error, such as KeyboardInterrupt.
bool is_interrupt();

}  // namespace torchtpu
