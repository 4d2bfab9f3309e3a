#include "bind/bridge.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "bind/calls.h"
#include "device/gil.h"
#include "launch/collection.h"
#include "launch/direct.h"
#include "launch/queue.h"
#include "launch/signals.h"

namespace torchtpu {

namespace py = pybind11;

namespace {

PyObject* engine_object = nullptr;

py::handle engine() {
  TORCH_CHECK(engine_object, "torchtpu: the engine is not set up");
  return engine_object;
}

template <class... Args>
py::object ask(const char* name, Args&&... args) {
  return call_method(engine(), name, std::forward<Args>(args)...);
}

// torch._C's set_eval_frame, once dynamo is loaded.
PyObject* set_eval_frame = nullptr;

// Dynamo would take the engine's Python frames for the user's.
class NoTracing {
 public:
  NoTracing() {
    if (set_eval_frame) before_ = py::handle(set_eval_frame)(py::none());
  }
  ~NoTracing() {
    if (!before_) return;
    py::error_scope pending;
    py::handle(set_eval_frame)(before_);
  }

 private:
  py::object before_;
};

// Runs `call`, which may wait, and turns a Python exception into one that torch's bindings restore.
template <class F>
auto interruptible(F&& call) {
  try {
    NoTracing scope;
    return call();
  } catch (py::error_already_set& e) {
    e.restore();
    throw_python_error();
  }
}

// The same for what does not wait: signal handlers do.
template <class F>
auto guarded(F&& call) {
  SignalsDeferred deferred;
  CollectionDeferred uncollected;
  return interruptible(std::forward<F>(call));
}

// A path as tracebacks show it, which is text wherever it goes: bytes that are not UTF-8 are backslash escapes.
std::string shown(PyObject* path) {
  if (const char* text = PyUnicode_AsUTF8(path)) return text;
  PyErr_Clear();
  auto bytes = py::reinterpret_steal<py::bytes>(PyUnicode_AsEncodedString(path, "utf-8", "backslashreplace"));
  if (bytes) return bytes;
  PyErr_Clear();
  return "?";
}

bool is_library_path(const char* path) {
  static const std::vector<std::string>* roots = [] {
    auto* found = new std::vector<std::string>();
    for (const char* name : {"torch", "torchtpu", "torchtpu.runtime"}) {
      std::string file = shown(py::module_::import(name).attr("__file__").ptr());
      found->push_back(file.substr(0, file.rfind('/') + 1));
    }
    return found;
  }();
  if (path[0] == '<') {  // generated, or typed at a prompt
    for (const char* prompt : {"<stdin>", "<python-input", "<ipython-input", "<doctest"}) {
      if (strncmp(path, prompt, strlen(prompt)) == 0) return false;
    }
    return true;
  }
  for (const auto& root : *roots) {
    if (strncmp(path, root.c_str(), root.size()) == 0) return true;
  }
  return false;
}

bool is_library_file(PyObject* path) {
  const char* text = PyUnicode_AsUTF8(path);
  if (text) return is_library_path(text);
  PyErr_Clear();
  return is_library_path(shown(path).c_str());
}

// The path of what follows `python -c`, and of methods that libraries generate.
bool is_string(PyObject* path) { return PyUnicode_CompareWithASCIIString(path, "<string>") == 0; }

}  // namespace

std::atomic<bool> reads_are_observed{false};

namespace {
// By device, whether the engine has launched there since it was asked last what became of it.
std::atomic<bool> may_be_unsettled[kMaxDevices];
}  // namespace

void set_engine(PyObject* engine) {
  set_main_thread();
  Py_INCREF(engine);
  Py_XDECREF(std::exchange(engine_object, engine));
}

void set_eval_frame_setter(PyObject* setter) {
  Py_INCREF(setter);
  Py_XDECREF(std::exchange(set_eval_frame, setter));
}

void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

bool is_interrupt() {
  try {
    throw;
  } catch (python_error& error) {
    AcquireGil gil;
    PyObject* type = error.type ? error.type : PyErr_Occurred();
    return type && !PyErr_GivenExceptionMatches(type, PyExc_Exception);
  } catch (py::error_already_set& error) {
    AcquireGil gil;
    return !error.matches(PyExc_Exception);
  } catch (...) {
    return false;
  }
}

// Each reader gets its own copy: a traceback keeps the reader's frame, and with it the failed value, alive.
void raise_stored(PyObject* error) {
  AcquireGil gil;
  SignalsDeferred deferred;
  auto stored = py::reinterpret_borrow<py::object>(error);
  py::object copy;
  try {
    copy = py::module_::import("copy").attr("copy")(stored);
    copy.attr("__cause__") = stored.attr("__cause__");
  } catch (py::error_already_set&) {  // an exception that cannot be copied
    copy = stored;
  }
  PyException_SetTraceback(copy.ptr(), Py_None);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(copy.ptr())), copy.ptr());
  throw_python_error();
}

thread_local const std::string* replayed_line = nullptr;

CodePlace::CodePlace(PyObject* frame) {
  auto* of = reinterpret_cast<PyFrameObject*>(frame);
  code_ = reinterpret_cast<PyObject*>(PyFrame_GetCode(of));
  instruction_ = PyFrame_GetLasti(of);
  Py_DECREF(frame);
}

CodePlace::~CodePlace() { defer_decref(code_); }

std::string CodePlace::line() const {
  AcquireGil gil;
  auto* code = reinterpret_cast<PyCodeObject*>(code_);
  return shown(code->co_filename) + (":" + std::to_string(PyCode_Addr2Line(code, instruction_)));
}

// The place of the innermost of these frames that is the user's, or else in a string; takes the reference.
static std::shared_ptr<CodePlace> users_place(PyFrameObject* frame) {
  std::shared_ptr<CodePlace> in_string;
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    bool is_users = !is_library_file(code->co_filename);
    bool is_first = !is_users && !in_string && is_string(code->co_filename);
    Py_DECREF(code);
    if (is_users) return std::make_shared<CodePlace>(reinterpret_cast<PyObject*>(frame));
    PyFrameObject* caller = PyFrame_GetBack(frame);
    if (is_first) {
      in_string = std::make_shared<CodePlace>(reinterpret_cast<PyObject*>(frame));
    } else {
      Py_DECREF(frame);
    }
    frame = caller;
  }
  return in_string;
}

std::shared_ptr<CodePlace> current_place() {
  if (!Py_IsInitialized() || (replayed_line && !replayed_line->empty())) return nullptr;
  AcquireGil gil;
  auto* frame = reinterpret_cast<PyFrameObject*>(Py_XNewRef(reinterpret_cast<PyObject*>(PyEval_GetFrame())));
  if (auto place = users_place(frame)) return place;
  PyThreadState* caller = callers_state();
  return caller ? users_place(PyThreadState_GetFrame(caller)) : nullptr;
}

std::string current_line() {
  if (replayed_line && !replayed_line->empty()) return *replayed_line;
  auto place = current_place();
  return place ? place->line() : "";
}

void infer_in_python(const OpInfo& info, Stack* stack) {
  AcquireGil gil;
  guarded([&] {
    py::list args;
    for (size_t i = 0; i < stack->size(); i++) {
      const IValue& v = (*stack)[i];
      bool is_dtype = info.args[i].role == ArgRole::kDtype && v.isInt();
      args.append(is_dtype ? py::cast(static_cast<at::ScalarType>(v.toInt())) : torch::jit::toPyObject(v));
    }
    py::object results = ask("infer", info.name, args);
    const auto& returns = info.handle.schema().returns();
    if (returns.size() == 1) results = py::make_tuple(results);
    stack->clear();
    for (size_t i = 0; i < returns.size(); i++) {
      py::object result = results[py::int_(i)];
      bool undefined = result.is_none() && returns[i].type()->kind() == c10::TypeKind::TensorType;
      stack->push_back(undefined ? IValue(at::Tensor()) : torch::jit::toIValue(result, returns[i].type()));
    }
  });
}

void report_fallback(const std::string& op, std::optional<at::ScalarType> dtype, int64_t nbytes) {
  std::string line = current_line();
  AcquireGil gil;
  py::object shown = dtype ? py::cast(*dtype) : py::object(py::none());
  guarded([&] { ask("fallback", op, shown, line, nbytes); });
}

at::Tensor download(PyObject* object) {
  AcquireGil gil;
  return interruptible([&] { return ask("download", py::handle(object)).cast<at::Tensor>(); });
}

PyObject* upload(const at::Tensor& host, c10::DeviceIndex device) {
  AcquireGil gil;
  return guarded([&] { return ask("upload", host, static_cast<int>(device)).release().ptr(); });
}

PyObject* upload_by(PyObject* client, const at::Tensor& host, int device) {
  return guarded([&] { return call_method(client, "upload", host, device).release().ptr(); });
}

void resolve_guard(PyObject* guard) {
  AcquireGil gil;
  interruptible([&] { ask("resolve", py::handle(guard)); });
}

bool has_passed(PyObject* guard) {
  AcquireGil gil;
  return interruptible([&] { return !call_method(guard, "has_failed").cast<bool>(); });
}

void report_read(const std::string& line, double started, double seconds, int64_t nbytes) {
  AcquireGil gil;
  guarded([&] { ask("was_read", line, started, seconds, nbytes); });
}

void report_waiting(const std::string& what, double seconds) {
  guarded([&] { ask("waiting", what, seconds); });
}

void report_waited() noexcept {
  AcquireGil gil;
  py::error_scope pending;
  try {
    guarded([&] { ask("waited"); });
  } catch (python_error& error) {
    error.restore();
    PyErr_WriteUnraisable(nullptr);
  }
}

void finish_device(c10::DeviceIndex device) {
  if (!may_be_unsettled[device].exchange(false)) return;
  AcquireGil gil;
  try {
    interruptible([&] { ask("await_launches", static_cast<int>(device)); });
    guarded([&] { ask("finish", static_cast<int>(device)); });
  } catch (...) {
    may_be_unsettled[device] = true;
    throw;
  }
}

void launch(const WorkRef& work) {
  guarded([&] {
    if (launch_directly(work)) return;
    Plan& plan = *work->plan;
    plan.direct = nullptr;
    Py_XDECREF(std::exchange(plan.direct_holder, nullptr));
    plan.engine_launches++;
    may_be_unsettled[work->device] = true;
    ask("launch", work);
  });
}

void resume(const WorkRef& work, size_t step, PyObject* values, PyObject* error, PyObject* launched) {
  may_be_unsettled[work->device] = true;
  ask("resume", work, step, py::handle(values), py::handle(error), py::handle(launched));
}

void plan(const std::shared_ptr<Plan>& plan) {
  try {
    ask("plan", plan);
  } catch (py::error_already_set& e) {
    plan_failed(*plan, e.value().ptr());
  }
}

}  // namespace torchtpu
