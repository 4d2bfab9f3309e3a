// The extension module `torchtpu.runtime._C`: every function that Python sees.  `_C.pyi` describes them.

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "bind/bridge.h"
#include "bind/process_group.h"
#include "device/device.h"
#include "device/gil.h"
#include "launch/collection.h"
#include "launch/direct.h"
#include "launch/execute.h"
#include "launch/process_end.h"
#include "launch/queue.h"
#include "launch/read.h"
#include "launch/signals.h"
#include "record/inference_cache.h"
#include "region/loop.h"
#include "region/outline.h"
#include "region/pieces.h"
#include "region/program.h"
#include "region/replay.h"

namespace torchtpu {

namespace {

OpFacts read_facts(const py::tuple& row) {
  OpFacts facts;
  for (auto item : row[1].cast<py::dict>()) {
    std::optional<std::vector<double>> values;
    if (!item.second.is_none()) values = item.second.cast<std::vector<double>>();
    facts.structural.emplace_back(item.first.cast<std::string>(), std::move(values));
  }
  facts.lifts = row[2].cast<bool>();
  facts.random = row[3].cast<bool>();
  facts.mutates = row[4].cast<std::vector<std::string>>();
  facts.has_infer = row[5].cast<bool>();
  facts.ints = row[6].cast<std::vector<std::string>>();
  facts.multiplies = row[7].cast<bool>();
  facts.runs_once = row[8].cast<bool>();
  facts.elementwise = row[9].cast<bool>();
  return facts;
}

// Whether a buffer's bytes are on the host alone.
bool is_on_host(const Buffer& buffer) { return !buffer.object && buffer.state != BufferState::kError; }

py::object input_object(const Work& work, size_t i, bool with_upload) {
  Buffer& buffer = *work.inputs.at(i);
  if (with_upload && is_on_host(buffer)) buffer.object = upload(buffer.host, buffer.device);
  return py::reinterpret_borrow<py::object>(buffer.object ? buffer.object : Py_None);
}

py::list input_objects(const Work& work, bool with_uploads) {
  py::list objects(work.inputs.size());
  for (size_t i = 0; i < work.inputs.size(); i++) {
    PyList_SET_ITEM(objects.ptr(), static_cast<Py_ssize_t>(i), input_object(work, i, with_uploads).release().ptr());
  }
  return objects;
}

py::list uploads(const Work& work) {
  py::list places;
  for (size_t i = 0; i < work.inputs.size(); i++) {
    if (is_on_host(*work.inputs[i])) places.append(i);
  }
  return places;
}

void drop_uploads(const Work& work, const std::vector<size_t>& places) {
  for (size_t i : places) {
    Buffer& buffer = *work.inputs.at(i);
    if (buffer.host.defined()) Py_XDECREF(std::exchange(buffer.object, nullptr));
  }
}

// The different objects that `get` finds at the inputs, each with these inputs as bits of an int.
template <class Get>
py::list by_input(const Work& work, Get&& get) {
  std::vector<std::pair<PyObject*, std::string>> found;
  for (size_t i = 0; i < work.inputs.size(); i++) {
    PyObject* object = get(*work.inputs[i]);
    if (!object) continue;
    auto it = std::find_if(found.begin(), found.end(), [&](const auto& known) { return known.first == object; });
    if (it == found.end()) it = found.insert(it, {object, std::string(work.inputs.size() / 8 + 1, 0)});
    it->second[i / 8] |= static_cast<char>(1 << i % 8);
  }
  py::list pairs;
  if (found.empty()) return pairs;
  auto from_bytes = py::handle(reinterpret_cast<PyObject*>(&PyLong_Type)).attr("from_bytes");
  for (const auto& [object, bits] : found)
    pairs.append(py::make_tuple(py::handle(object), from_bytes(py::bytes(bits), "little")));
  return pairs;
}

// An input without a value: it failed, or a subgraph goes without it.
PyObject* error_of(const Buffer& buffer) {
  static PyObject* missing = py::handle(PyExc_RuntimeError)("tpu: not recorded yet").release().ptr();
  return buffer.state == BufferState::kError && !buffer.error ? missing : buffer.error;
}

py::object or_none(PyObject* object) { return py::reinterpret_borrow<py::object>(object ? object : Py_None); }

py::object optional_tensor(const at::Tensor& t) { return t.defined() ? py::cast(t) : py::object(py::none()); }

py::dict describe_region(const Work& work) {
  py::dict d;
  d["sequence"] = work.sequence;
  d["ops"] = work.plan->node->depth;
  d["inputs"] = work.inputs.size();
  d["outputs"] = work.outputs.size();
  d["reason"] = work.reason;
  d["line"] = work.line;
  d["cut_at"] = work.cut_at;
  return d;
}

py::dict stats() {
  py::dict d, cuts;
  int64_t trie_nodes = 0, trie_plans = 0, live_nodes = 0;
  for (Recorder* r : all_recorders()) {
    StateGuard guard(state_lock);
    trie_nodes += r->trie->nodes;
    trie_plans += r->trie->plans;
    live_nodes += r->at->next_value;
  }
  Counters now;
  {
    StateGuard guard(state_lock);
    now = runtime.counters;
  }
  for (const auto& [reason, count] : now.cuts) cuts[reason.c_str()] = count;
  int64_t buffers = 0;
  for (const auto& device : memory_stats) buffers += device.buffers;
  d["ops_recorded"] = now.hits + now.misses;
  d["trie_hits"] = now.hits;
  d["trie_misses"] = now.misses;
  InferenceCounts inferences = inference_counts();
  d["shapes_inferred"] = inferences.all;
  d["shapes_inferred_on_meta"] = py::cast(inferences.on_meta);
  d["trie_nodes"] = trie_nodes;
  d["trie_plans"] = trie_plans;
  d["array_shapes"] = num_bases();
  d["streams_forgotten"] = now.forgotten;
  d["regions"] = now.regions;
  d["subgraphs"] = now.subgraphs;
  d["cuts"] = cuts;
  d["live_buffers"] = buffers;
  d["live_nodes"] = live_nodes;
  d["queue"] = queue_length();
  d["launched_ahead"] = num_launched_ahead.load();
  return d;
}

void reset_stats() {
  reset_inference_counts();
  num_launched_ahead = 0;
  StateGuard guard(state_lock);
  runtime.counters = {};
}

// Values of the pending region will be buffers at the next cut; they count as allocated already.
int64_t pending_bytes(c10::DeviceIndex device) {
  int64_t bytes = 0;
  for (Recorder* r : all_recorders()) {
    if (r->device != device) continue;
    StateGuard guard(state_lock);
    for (int32_t value = 0; value < r->at->next_value; value++) {
      if (r->live[value]) bytes += static_cast<int64_t>(r->live[value]->nbytes());
    }
  }
  return bytes;
}

py::dict device_memory(int device) {
  auto& m = memory_stats[device];
  int64_t allocated = m.allocated + pending_bytes(static_cast<c10::DeviceIndex>(device));
  py::dict d;
  d["allocated"] = allocated;
  d["peak"] = std::max(m.peak.load(), allocated);
  d["reserved"] = allocated;
  d["peak_reserved"] = std::max(m.peak.load(), allocated);
  d["num_buffers"] = m.buffers.load();
  d["total_allocated"] = m.total.load();
  return d;
}

py::list live_tensors(int device) {
  py::list found;
  double now = seconds_now();
  for (const BufferRef& buffer : live_buffers(static_cast<c10::DeviceIndex>(device))) {
    const Maker& maker = buffer->maker;
    py::dict d;
    d["shape"] = py::tuple(py::cast(buffer->base->shape));
    d["dtype"] = py::cast(buffer->base->dtype);
    d["nbytes"] = buffer->base->nbytes;
    d["age"] = now - buffer->made_at;
    d["op"] = maker.op ? maker.op->name : "";
    d["line"] = maker.line ? *maker.line : "";
    found.append(d);
  }
  return found;
}

py::object dump(int device) {
  Recorder& r = recorder_for(static_cast<c10::DeviceIndex>(device));
  std::vector<BaseRef> inputs;
  std::vector<int32_t> outputs;
  std::optional<HeldNode> held;
  {
    StateGuard guard(state_lock);
    if (r.is_empty()) return py::none();
    held.emplace(r.trie, r.at);
    for (const auto& input : r.inputs) inputs.push_back(input->base);
    for (int32_t value = 0; value < r.at->next_value; value++) {
      if (r.live[value]) outputs.push_back(value);
    }
  }
  const Node* first = *held;
  while (first->parent->info) first = first->parent;
  return make_program(*held, inputs, outputs, {}, first->line);
}

void bind_engine_types(py::module& m) {
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def_property_readonly("program",
                             [](const Plan& p) { return make_program(p.node, p.inputs, p.outputs, p.donated, p.line); })
      .def_property_readonly("before", [](const Plan& p) { return p.before; })
      .def_property_readonly("device", [](const Plan& p) { return static_cast<int>(p.device); })
      .def_property_readonly("line", [](const Plan& p) { return p.line; })
      .def_property_readonly("regions", [](const Plan& p) { return p.regions; })
      .def_property_readonly("is_loop", [](const Plan& p) { return is_loop(path_to(p.node)); })
      .def_property_readonly("nearest", [](const Plan& p) { return p.nearest; })
      .def_property_readonly("run", [](const Plan& p) { return describe_run(p, p.entry.get(), p.line); })
      .def("ready", [](Plan& p, py::object executable) { plan_ready(p, executable.ptr()); })
      .def("failed", [](Plan& p, py::object error) { plan_failed(p, error.ptr()); });
  py::class_<Work, std::shared_ptr<Work>>(m, "Work")
      .def_property_readonly("executable", [](const Work& w) { return or_none(w.plan->executable); })
      .def_property_readonly("build_error", [](const Work& w) { return or_none(w.plan->error); })
      .def_property_readonly("stopped_by", [](const Work& w) { return or_none(w.transaction->error); })
      .def_property_readonly("device", [](const Work& w) { return static_cast<int>(w.device); })
      .def_property_readonly("floats", [](const Work& w) { return optional_tensor(w.floats); })
      .def_property_readonly("ints", [](const Work& w) { return optional_tensor(w.ints); })
      .def_property_readonly("region", &describe_region)
      .def_property_readonly("run", [](const Work& w) { return describe_run(*w.plan, w.entry.get(), w.line); })
      .def_property_readonly("program",
                             [](const Work& w) {
                               const Plan& p = *w.plan;
                               return make_program(p.node, p.inputs, p.outputs, p.donated, p.line);
                             })
      .def("inputs", &input_objects, py::arg("with_uploads") = true)
      .def("input", [](const Work& w, size_t i) { return input_object(w, i, true); })
      .def("uploads", &uploads)
      .def("drop_uploads", &drop_uploads)
      .def_property_readonly("engine_launches", [](const Work& w) { return w.plan->engine_launches; })
      .def("launch_directly",
           [](Work& w, py::object holder) {
             w.plan->direct = holder.cast<DirectLaunch*>();
             Py_XDECREF(std::exchange(w.plan->direct_holder, holder.release().ptr()));
           })
      .def_property_readonly("is_subgraph", [](const Work& w) { return w.is_subgraph || w.ahead == Ahead::kTrying; })
      .def_property_readonly("is_ahead", [](const Work& w) { return w.ahead == Ahead::kTrying; })
      .def_property_readonly("output_bytes", [](const Work& w) { return w.plan->output_bytes; })
      .def("errors", [](const Work& w) { return by_input(w, &error_of); })
      .def("guards", [](const Work& w) { return by_input(w, [](const Buffer& b) { return b.guard; }); })
      .def("done",
           [](Work& w, const py::list& objects, const py::list& guards) {
             std::vector<PyObject*> raw, checks;
             for (auto object : objects) raw.push_back(object.ptr());
             for (auto guard : guards) checks.push_back(guard.is_none() ? nullptr : guard.ptr());
             TORCH_CHECK(raw.size() >= w.outputs.size() && (checks.empty() || checks.size() >= w.outputs.size()),
                         "torchtpu: a launch returned too few outputs");
             work_done(w, raw, checks);
           })
      .def("poison",
           [](Work& w, size_t output, py::object error) {
             if (output < w.outputs.size()) work_spoil(w, output, error.ptr());
           })
      .def("keep",
           [](Work& w, size_t output, py::object object, py::object guard) {
             if (output < w.outputs.size()) work_keep(w, output, object.ptr(), guard.is_none() ? nullptr : guard.ptr());
           })
      .def("restore",
           [](Work& w, size_t output, const py::tuple& base, py::object object, py::object guard) {
             if (output >= w.outputs.size()) return;
             auto held = intern_base(base[0].cast<std::vector<int64_t>>(), base[1].cast<at::ScalarType>());
             work_restore(w, output, std::move(held), object.ptr(), guard.is_none() ? nullptr : guard.ptr());
           })
      .def("take_back", &work_take_back)
      .def("failed", [](Work& w, py::object error) { work_failed(w, error.ptr()); });
}

template <class Deferred>
struct Scope {
  std::optional<Deferred> deferred;
};

template <class Deferred>
void bind_scope(py::module_& m, const char* name) {
  py::class_<Scope<Deferred>>(m, name)
      .def(py::init<>())
      .def("__enter__", [](Scope<Deferred>& scope) { scope.deferred.emplace(); })
      .def("__exit__", [](Scope<Deferred>& scope, const py::args&) { scope.deferred.reset(); });
}

}  // namespace
}  // namespace torchtpu

PYBIND11_MODULE(_C, m) {
  using namespace torchtpu;
  install_terminate_handler();
  begin_collection();
  m.attr("built_torch_version") = TORCH_VERSION;
  bind_device(m);
  bind_engine_types(m);
  bind_direct(m);
  bind_replay(m);
  bind_outline(m);
  bind_pieces(m);
  bind_process_group(m);
  m.def("register_ops", [](const py::list& rows) {
    std::vector<std::pair<std::string, OpFacts>> table;
    for (auto row : rows) {
      auto fields = row.cast<py::tuple>();
      table.emplace_back(fields[0].cast<std::string>(), read_facts(fields));
    }
    return register_ops(table);
  });
  m.def("register_op", [](const py::tuple& row) { register_op(row[0].cast<std::string>(), read_facts(row)); });
  m.def("set_engine", [](const py::object& engine) { set_engine(engine.ptr()); });
  m.def("cut", [](const std::string& reason) {
    static auto* reasons = new std::unordered_map<std::string, std::string>();
    const char* kept = reasons->try_emplace(reason, reason).first->second.c_str();
    ReleaseGil release;
    bool any = false;
    for (c10::DeviceIndex device = 0; device < device_count(); device++)
      any |= cut(recorder_for(device), kept) != nullptr;
    return any;
  });
  m.def("mark_boundary", [](const std::string& reason, py::object undo) {
    static auto* reasons = new std::unordered_map<std::string, std::string>();
    std::shared_ptr<PyObject> held;
    if (!undo.is_none()) held.reset(undo.release().ptr(), &defer_decref);
    mark_boundary(reasons->try_emplace(reason, reason).first->second.c_str(), held);
  });
  m.def("forget_streams", &forget_streams);
  m.def("synchronize", [](int device) { synchronize(static_cast<c10::DeviceIndex>(device)); }, py::arg("device") = -1);
  py::class_<Reading, std::shared_ptr<Reading>>(m, "Reading")
      .def(py::init([](const at::Tensor& t) {
        auto reading = std::make_shared<Reading>(t);
        wake_launcher();
        return reading;
      }))
      .def("wait", [](const Reading& reading) { return reading.wait().clone(at::MemoryFormat::Preserve); });
  m.def("end_raised_transactions", &end_raised_transactions);
  m.def("to_host", [](const at::Tensor& t) { return read_to_host(t).clone(at::MemoryFormat::Preserve); });
  m.def("stats", &stats);
  m.def("reset_stats", &reset_stats);
  m.def("memory_stats", &device_memory);
  m.def("live_tensors", &live_tensors);
  m.def("reset_peak_memory", [](int device) { memory_stats[device].peak = memory_stats[device].allocated.load(); });
  m.def("record_marker", [](int device) { return record_marker(static_cast<c10::DeviceIndex>(device)); });
  m.def("wait_marker", &wait_marker);
  m.def("marker_time", &marker_time);
  m.def("set_sync", [](bool on) { runtime.is_synchronous = on; });
  m.def("set_policy", [](bool is_frozen, bool is_exact, bool gives_room) {
    runtime.policy.gives_room = gives_room;
    runtime.policy.is_frozen = is_frozen;
    runtime.policy.is_exact = is_exact;
  });
  m.def("set_limits",
        [](int64_t max_ops, int64_t max_bytes, int64_t max_in_flight, int64_t max_nodes, int64_t max_plans) {
          runtime.limits.max_nodes = max_nodes;
          runtime.limits.max_plans = max_plans;
          runtime.limits.max_ops = max_ops;
          runtime.limits.max_bytes = max_bytes;
          runtime.limits.max_in_flight = max_in_flight;
        });
  m.def("set_eval_frame_setter", [](const py::object& setter) { set_eval_frame_setter(setter.ptr()); });
  m.def("observe_reads", [](bool on) { reads_are_observed = on; });
  m.def("dump", &dump);
  m.def("current_line", &current_line);
  m.def("drain", [] { drain_decrefs(); });
  bind_scope<SignalsDeferred>(m, "SignalsDeferred");
  bind_scope<CollectionDeferred>(m, "CollectionDeferred");
  py::class_<Bell>(m, "Bell")
      .def(py::init<>())
      .def_property_readonly("count", &Bell::count)
      .def("ring", &Bell::ring)
      .def("wait", &Bell::wait);
  m.def("execute", &execute);
  m.def("forget_deferred_collections", &forget_deferred_collections);
  // No bytecode runs, and so no signal handler, where a built-in function calls one.
  m.def("without_arguments", [](py::object call) { return py::cpp_function([call](const py::args&) { call(); }); });
  m.def("shutdown", [](double seconds, const py::object& close, bool is_interrupted) {
    SignalsDeferred deferred;
    bool have_ended = shutdown(seconds);
    keep_threads_from_exiting();
    if (!close().cast<bool>() || !have_ended) exit_without_destructors();
    if (is_interrupted) exit_as_interrupted();  // before what was asked for earlier
  });
}
