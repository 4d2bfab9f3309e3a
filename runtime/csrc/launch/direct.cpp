#include "launch/direct.h"

#include <ATen/Context.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <array>

#include "bind/bridge.h"
#include "bind/calls.h"
#include "device/gil.h"

namespace torchtpu {

namespace {

namespace py = pybind11;

std::atomic<uint64_t> settings{0};

PyObject* interned(const char* text) {
  PyObject* made = PyUnicode_InternFromString(text);
  if (!made) throw py::error_already_set();
  return made;
}

py::object owned(PyObject* object) {
  if (!object) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

// As call_or_null (calls.h), for a name that is made once.
py::object call(PyObject* object, PyObject* name, std::initializer_list<PyObject*> arguments) {
  std::array<PyObject*, 8> given{object};
  std::copy(arguments.begin(), arguments.end(), given.begin() + 1);
  return owned(
      [&]() noexcept { return PyObject_VectorcallMethod(name, given.data(), arguments.size() + 1, nullptr); }());
}

template <class T>
void gather(std::string& data, const DirectNumbers& numbers, const at::Tensor& given) {
  size_t count = numbers.are_all ? static_cast<size_t>(given.numel()) : numbers.taken.size();
  data.resize((count + numbers.constants.size()) * sizeof(T));
  auto* made = reinterpret_cast<T*>(data.data());
  const T* from = given.defined() ? given.const_data_ptr<T>() : nullptr;
  for (size_t i = 0; i < count; i++) made[i] = from[numbers.are_all ? static_cast<int64_t>(i) : numbers.taken[i]];
  for (size_t i = 0; i < numbers.constants.size(); i++) made[count + i] = static_cast<T>(numbers.constants[i]);
}

// The array of a step's numbers.
template <class T>
const py::object& array_of(DirectNumbers& numbers, const at::Tensor& given, const DirectLaunch& direct, int device) {
  static std::string& data = *new std::string();  // under the GIL, which `gather` keeps
  gather<T>(data, numbers, given);
  if (numbers.array && data == numbers.data) return numbers.array;
  at::Tensor host =
      at::detail::empty_cpu({static_cast<int64_t>(data.size() / sizeof(T))}, c10::CppTypeToScalarType<T>::value);
  memcpy(host.mutable_data_ptr(), data.data(), data.size());
  numbers.array = py::object();
  numbers.data = data;
  numbers.array = py::reinterpret_steal<py::object>(upload_by(direct.client.ptr(), host, static_cast<int>(device)));
  return numbers.array;
}

// Whether a value has not failed, and does not hang on a check.
bool is_plain(const Buffer& buffer) {
  return buffer.state.load(std::memory_order_relaxed) != BufferState::kError && !buffer.guard;
}

// The work's arrays, those of host tensors uploaded; false where one has failed, is guarded, or is no plain array.
bool take_inputs(const Work& work, const DirectLaunch& direct, std::vector<py::object>& slots) {
  for (size_t i = 0; i < work.inputs.size(); i++) {
    Buffer& buffer = *work.inputs[i];
    if (!is_plain(buffer)) return false;
    if (!buffer.object) {
      if (!buffer.host.defined()) return false;
      try {
        buffer.object = upload(buffer.host, buffer.device);
      } catch (python_error&) {  // the engine, which tries again, knows what to do
        return false;
      }
    }
    if (Py_TYPE(buffer.object) != direct.array_type) return false;
    slots[i] = py::reinterpret_borrow<py::object>(buffer.object);
  }
  return true;
}

py::list taken_from(const std::vector<py::object>& slots) {
  py::list found(slots.size());
  for (size_t i = 0; i < slots.size(); i++) {
    PyObject* object = slots[i] ? slots[i].ptr() : Py_None;
    PyList_SET_ITEM(found.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(object));
  }
  return found;
}

std::vector<py::object> numbers_of(const DirectStep& step, const Work& work, const DirectLaunch& direct) {
  std::vector<py::object> numbers;
  if (step.floats) numbers.push_back(array_of<double>(*step.floats, work.floats, direct, work.device));
  if (step.ints) numbers.push_back(array_of<int64_t>(*step.ints, work.ints, direct, work.device));
  return numbers;
}

// Clears the error of an upload, which the engine tries again; raises any other one.
bool leave_to_engine() {
  for (PyObject* kind : {PyExc_RuntimeError, PyExc_ValueError, PyExc_TypeError, PyExc_MemoryError}) {
    if (!PyErr_ExceptionMatches(kind)) continue;
    PyErr_Clear();
    return false;
  }
  throw_python_error();
}

py::list arguments_of(const DirectStep& step, const Work& work, const DirectLaunch& direct,
                      const std::vector<py::object>& slots) {
  std::vector<py::object> numbers = numbers_of(step, work, direct);
  py::list arguments(step.inputs.size() + numbers.size());
  Py_ssize_t place = 0;
  for (int32_t slot : step.inputs) PyList_SET_ITEM(arguments.ptr(), place++, Py_NewRef(slots[slot].ptr()));
  for (py::object& array : numbers) PyList_SET_ITEM(arguments.ptr(), place++, array.release().ptr());
  return arguments;
}

// Whether the launch surely has the memory that it takes, which then is its own.
bool has_room(const DirectLaunch& direct, int device) {
  if (!direct.needed_bytes) return true;
  static PyObject* admit = interned("admit");
  py::int_ on(device);
  return call(direct.context.ptr(), admit, {on.ptr(), direct.needed_bytes.ptr()}).cast<bool>();
}

// Whether the words that a launch's checks come to are all 0; asks the context where they lie on a device.
bool checks_passed(const DirectLaunch& direct, PyObject* words) {
  Py_buffer view;
  if (PyObject_GetBuffer(words, &view, PyBUF_SIMPLE) == 0) {
    const char* data = static_cast<const char*>(view.buf);
    bool are_zero = std::all_of(data, data + view.len, [](char byte) { return byte == 0; });
    PyBuffer_Release(&view);
    return are_zero;
  }
  PyErr_Clear();
  static PyObject* name = interned("has_passed");
  return call(direct.context.ptr(), name, {words}).cast<bool>();
}

// What a step makes; where one of its checks has failed, `failed` is all that its launch returned.
py::list run_step(const DirectStep& step, const Work& work, const DirectLaunch& direct,
                  const std::vector<py::object>& slots, py::object& failed) {
  static PyObject* execute = interned("execute");
  py::list arguments = arguments_of(step, work, direct, slots);
  py::object launched =
      call(direct.client.ptr(), execute, {step.executable.ptr(), arguments.ptr(), step.handlers.ptr()});
  auto outputs = py::reinterpret_borrow<py::list>(PyTuple_GetItem(launched.ptr(), 0));
  if (!outputs) throw py::error_already_set();
  if (direct.needed_bytes) {
    static PyObject* track = interned("track");
    py::int_ device(work.device);
    PyObject* token = PyTuple_GET_ITEM(launched.ptr(), 1);
    call(direct.context.ptr(), track, {device.ptr(), step.program.ptr(), token, arguments.ptr(), outputs.ptr()});
  }
  if (!step.has_checks) return outputs;
  if (!checks_passed(direct, PyList_GET_ITEM(outputs.ptr(), PyList_GET_SIZE(outputs.ptr()) - 1))) failed = launched;
  return outputs;
}

}  // namespace

void forget_direct_launches() { settings++; }

bool is_direct(const Work& work) {
  const DirectLaunch* direct = work.plan ? work.plan->direct : nullptr;
  return direct && work.ahead != Ahead::kTrying && direct->left > 0 &&
         direct->settings == settings.load(std::memory_order_relaxed) &&
         direct->is_deterministic == at::globalContext().deterministicAlgorithms() && !work.transaction->error;
}

bool prepare_directly(const Work& work) {
  if (!is_direct(work) || work.plan->direct->needed_bytes) return false;
  const DirectLaunch& direct = *work.plan->direct;
  try {
    for (const auto& input : work.inputs) {
      if (!is_plain(*input) || (input->object && Py_TYPE(input->object) != direct.array_type)) return false;
      if (!input->object && input->host.defined()) input->object = upload(input->host, input->device);
    }
    for (const DirectStep& step : direct.steps) numbers_of(step, work, direct);
  } catch (python_error& error) {
    error.restore();
    return leave_to_engine();
  } catch (py::error_already_set& error) {
    error.restore();
    return leave_to_engine();
  }
  return true;
}

bool launch_directly(const WorkRef& ref) {
  Work& work = *ref;
  if (!is_direct(work)) return false;
  auto held = py::reinterpret_borrow<py::object>(work.plan->direct_holder);
  DirectLaunch& direct = *work.plan->direct;
  std::vector<py::object> slots(direct.num_slots);
  if (!take_inputs(work, direct, slots) || !has_room(direct, work.device)) return false;
  direct.left--;
  direct.taken++;
  for (size_t number = 0; number < direct.steps.size(); number++) {
    const DirectStep& step = direct.steps[number];
    py::object failed;
    py::list outputs;
    try {
      outputs = run_step(step, work, direct, slots, failed);
    } catch (py::error_already_set& error) {
      resume(ref, number, taken_from(slots).ptr(), error.value().ptr(), Py_None);
      return true;
    } catch (std::exception& error) {
      py::object shown = py::handle(PyExc_RuntimeError)(error.what());
      resume(ref, number, taken_from(slots).ptr(), shown.ptr(), Py_None);
      return true;
    }
    if (failed) {
      resume(ref, number, taken_from(slots).ptr(), Py_None, failed.ptr());
      return true;
    }
    for (size_t k = 0; k < step.outputs.size(); k++) {
      slots[step.outputs[k]] = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(outputs.ptr(), k));
    }
    for (int32_t slot : step.dying) slots[slot] = py::object();
  }
  for (auto& [launches, of_steps] : direct.tiers) *launches += of_steps;
  std::vector<PyObject*> made;
  made.reserve(direct.outputs.size());
  for (int32_t slot : direct.outputs) made.push_back(slots[slot].ptr());
  work_done(work, made, {});
  return true;
}

void bind_direct(py::module& m) {
  m.def("forget_direct_launches", &forget_direct_launches);
  py::class_<LaunchCounts, std::shared_ptr<LaunchCounts>>(m, "LaunchCounts")
      .def(py::init<>())
      .def("add", [](LaunchCounts& counts, const std::string& tier) { counts.by_tier[tier]++; })
      .def("by_tier", [](const LaunchCounts& counts) { return counts.by_tier; })
      .def("total",
           [](const LaunchCounts& counts) {
             int64_t total = 0;
             for (auto& [tier, launches] : counts.by_tier) total += launches;
             return total;
           })
      .def("reset", [](LaunchCounts& counts) {
        for (auto& [tier, launches] : counts.by_tier) launches = 0;
      });
  py::class_<DirectLaunch, std::shared_ptr<DirectLaunch>>(m, "DirectLaunch")
      .def(py::init([](py::object client, py::object context, std::shared_ptr<LaunchCounts> counts,
                       py::handle array_type, std::vector<int32_t> outputs, size_t num_slots) {
        auto made = std::make_shared<DirectLaunch>();
        made->client = std::move(client);
        made->context = std::move(context);
        made->counts = std::move(counts);
        made->array_type = reinterpret_cast<PyTypeObject*>(array_type.ptr());
        made->outputs = std::move(outputs);
        made->num_slots = num_slots;
        return made;
      }))
      .def("add_step",
           [](DirectLaunch& direct, py::object program, py::object executable, py::object handlers,
              std::vector<int32_t> inputs, std::vector<int32_t> outputs, std::vector<int32_t> dying, bool has_checks,
              const std::string& tier) {
             int64_t* launches = &direct.counts->by_tier[tier];
             auto of_tier = std::find_if(direct.tiers.begin(), direct.tiers.end(),
                                         [&](auto& known) { return known.first == launches; });
             if (of_tier == direct.tiers.end()) of_tier = direct.tiers.insert(of_tier, {launches, 0});
             of_tier->second++;
             direct.steps.push_back({std::move(executable), std::move(handlers), std::move(program), std::move(inputs),
                                     std::move(outputs), std::move(dying), std::nullopt, std::nullopt, has_checks});
           })
      .def("account",
           [](DirectLaunch& direct, py::int_ needed_bytes) { direct.needed_bytes = std::move(needed_bytes); })
      .def_property_readonly("is_accounted", [](const DirectLaunch& direct) { return bool(direct.needed_bytes); })
      .def("give_floats",
           [](DirectLaunch& direct, std::optional<std::vector<int64_t>> taken) {
             DirectNumbers& numbers = direct.steps.back().floats.emplace();
             numbers.are_all = !taken;
             if (taken) numbers.taken = std::move(*taken);
           })
      .def("give_ints",
           [](DirectLaunch& direct, std::optional<std::vector<int64_t>> taken, std::vector<int64_t> constants) {
             DirectNumbers& numbers = direct.steps.back().ints.emplace();
             numbers.are_all = !taken;
             if (taken) numbers.taken = std::move(*taken);
             numbers.constants = std::move(constants);
           })
      .def("grant",
           [](DirectLaunch& direct, int64_t launches) {
             direct.left = launches;
             direct.settings = settings;
             direct.is_deterministic = at::globalContext().deterministicAlgorithms();
           })
      .def_readonly("taken", &DirectLaunch::taken);
}

}  // namespace torchtpu
