// What programs have in common is compared as bytes, in which each part follows from those before it.

#include "region/outline.h"

#include <torch/csrc/Dtype.h>

#include "region/fields.h"

namespace torchtpu {

namespace {

constexpr size_t kMostViews = 1 << 16;  // views, and ints among arguments

void put_ints(std::string& text, PyObject* given) {
  put(text, PyTuple_GET_SIZE(given));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) put(text, as_int(PyTuple_GET_ITEM(given, i)));
}

void put_lifted(std::string& text, PyObject* given) {
  const Fields& f = fields();
  text += static_cast<char>(PyUnicode_READ_CHAR(get(given, f.kind).ptr(), 0));
  put(text, as_int(get(given, f.index).ptr()));
}

}  // namespace

// One program, while it is read.
class OutlineReading {
 public:
  explicit OutlineReading(OutlineReader& reader) : reader_(reader) {}

  py::tuple read(PyObject* program) {
    const Fields& f = fields();
    auto inputs = get(program, f.inputs);
    put(text_, PyTuple_GET_SIZE(inputs.ptr()));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs.ptr()); i++) input(PyTuple_GET_ITEM(inputs.ptr(), i));
    auto ops = get(program, f.ops);
    put(text_, PyTuple_GET_SIZE(ops.ptr()));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(ops.ptr()); i++) op(PyTuple_GET_ITEM(ops.ptr(), i));
    put_ints(text_, get(program, f.outputs).ptr());
    put_ints(text_, get(program, f.donated).ptr());
    put(text_, as_int(get(program, f.floats).ptr()));
    put(text_, as_int(get(program, f.ints).ptr()));
    return py::make_tuple(py::bytes(text_), slots_);
  }

 private:
  void slot(int64_t number) { slots_.append(number); }

  void input(PyObject* base) {
    PyObject* shape = PyTuple_GET_ITEM(base, 0);
    put(text_, PyTuple_GET_SIZE(shape));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); i++) {
      int64_t size = as_int(PyTuple_GET_ITEM(shape, i));
      bool is_slot = size > 1;  // see `_dims` in runtime.padding.layout
      text_ += is_slot ? 's' : static_cast<char>('0' + size);
      if (is_slot) slot(size);
    }
    put(text_, PyTuple_GET_ITEM(base, 1));
  }

  void op(PyObject* given) {
    const Fields& f = fields();
    auto name = get(given, f.name);
    put_text(text_, name.ptr());
    other(get(given, f.settings).ptr());
    auto args = get(given, f.args);
    put(text_, PyTuple_GET_SIZE(args.ptr()));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args.ptr()); i++) {
      argument(name.ptr(), i, PyTuple_GET_ITEM(args.ptr(), i));
    }
    auto results = get(given, f.results), writes = get(given, f.writes);
    bool is_in_order = PyTuple_GET_SIZE(writes.ptr()) < 2;
    put(text_, PyTuple_GET_SIZE(results.ptr()));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(results.ptr()); i++) {
      result(PyTuple_GET_ITEM(results.ptr(), i), is_in_order);
    }
    put(text_, PyTuple_GET_SIZE(writes.ptr()));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(writes.ptr()); i++) {
      write(PyTuple_GET_ITEM(writes.ptr(), i), is_in_order);
    }
    if (!is_in_order) {
      for (auto made : reader_.made_(py::handle(given))) tensor(made.ptr(), Role::kMade);
    }
  }

  enum class Role { kArgument, kMade };

  void argument(PyObject* op, int64_t place, PyObject* given) {
    const Fields& f = fields();
    if (is_a(given, f.operand)) {
      tensor(given, Role::kArgument);
    } else if (PyTuple_CheckExact(given) || PyList_CheckExact(given)) {
      text_ += '(';
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(given); i++) {
        argument(op, place, PySequence_Fast_GET_ITEM(given, i));
      }
      text_ += ')';
    } else if (is_a(given, f.scalar)) {
      auto value = get(given, f.value);
      text_ += 'S';
      number(op, place, value.ptr());
      put(text_, get(given, f.dtype).ptr());
      text_ += get(given, f.wrapped).ptr() == Py_True ? 'w' : '-';
    } else {
      number(op, place, given);
    }
  }

  // An argument that may be an int which is a slot.
  void number(PyObject* op, int64_t place, PyObject* given) {
    if (PyLong_CheckExact(given) && !reader_.is_kept(op, place, given)) {
      text_ += '#';
      slots_.append(py::handle(given));
    } else {
      other(given);
    }
  }

  void other(PyObject* given) {
    const Fields& f = fields();
    if (given == Py_None) {
      text_ += 'N';
    } else if (PyBool_Check(given)) {
      text_ += given == Py_True ? 'B' : 'b';
    } else if (PyFloat_CheckExact(given)) {
      text_ += 'f';
      put(text_, PyFloat_AS_DOUBLE(given));
    } else if (is_a(given, f.lifted)) {
      text_ += 'L';
      put_lifted(text_, given);
    } else if (is_a(given, f.random)) {
      text_ += 'R';
      put_lifted(text_, get(given, f.seed).ptr());
      put_lifted(text_, get(given, f.offset).ptr());
    } else if (THPDtype_Check(given)) {  // lives as long as the process
      text_ += 'd';
      put(text_, given);
    } else {
      text_ += 'r';
      put(text_, Py_TYPE(given));
      put_text(text_, py::repr(py::handle(given)).ptr());
    }
  }

  void tensor(PyObject* given, Role role) {
    const Fields& f = fields();
    auto value = get(given, f.value), base = get(given, f.base), sizes = get(given, f.sizes);
    auto strides = get(given, f.strides);
    py::object offset = is_a(given, f.result) ? py::object(py::int_(0)) : get(given, f.offset);
    bool is_lifted = is_a(offset.ptr(), f.lifted), is_argument = role == Role::kArgument;
    auto view = reader_.view_of(PyTuple_GET_ITEM(base.ptr(), 0), sizes.ptr(), strides.ptr(),
                                is_lifted ? Py_None : offset.ptr(), is_argument && value.is_none(), is_argument);
    text_ += 'T';
    put(text_, view->number);
    put(text_, value.is_none() ? INT64_MIN : as_int(value.ptr()));
    put(text_, get(given, f.dtype).ptr());
    put(text_, PyTuple_GET_ITEM(base.ptr(), 1));
    text_ += is_lifted ? 'o' : '-';
    if (is_lifted) put_lifted(text_, offset.ptr());
    for (int64_t number : view->slots) slot(number);
  }

  void result(PyObject* given, bool is_read) {
    if (given == Py_None) {
      text_ += 'N';
    } else if (PyTuple_CheckExact(given)) {
      text_ += '(';
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) result(PyTuple_GET_ITEM(given, i), is_read);
      text_ += ')';
    } else if (is_read) {
      tensor(given, Role::kMade);
    } else {
      text_ += 'M';
    }
  }

  void write(PyObject* given, bool is_read) {
    const Fields& f = fields();
    put(text_, as_int(get(given, f.arg).ptr()));
    auto element = get(given, f.element);
    put(text_, element.is_none() ? int64_t{-1} : as_int(element.ptr()));
    put(text_, as_int(get(given, f.value).ptr()));
    text_ += get(given, f.replaces).ptr() == Py_True ? 'r' : '-';
    if (is_read) tensor(given, Role::kMade);
  }

  OutlineReader& reader_;
  std::string text_;
  py::list slots_;
};

py::tuple OutlineReader::read(const py::object& program) { return OutlineReading(*this).read(program.ptr()); }

std::shared_ptr<const OutlineReader::View> OutlineReader::view_of(PyObject* shape, PyObject* sizes, PyObject* strides,
                                                                  PyObject* offset, bool is_zero, bool is_read) {
  std::string key;
  put_ints(key, shape);
  put_ints(key, sizes);
  put_ints(key, strides);
  put(key, offset == Py_None ? int64_t{-1} : as_int(offset));
  key += static_cast<char>(is_zero | is_read << 1);
  auto it = views_.find(key);
  if (it != views_.end()) return it->second;
  auto found = view_(py::handle(shape), py::handle(sizes), py::handle(strides), py::handle(offset), is_zero, is_read)
                   .cast<py::tuple>();
  auto made = std::make_shared<const View>(View{number_of(found[0]), found[1].cast<std::vector<int64_t>>()});
  if (views_.size() >= kMostViews) views_.clear();
  return views_[key] = made;
}

int64_t OutlineReader::number_of(const py::object& view) {
  if (numbers_.size() >= kMostViews) {
    numbers_.clear();
    views_.clear();
  }
  if (!numbers_.contains(view)) numbers_[view] = count_++;
  return numbers_[view].cast<int64_t>();
}

bool OutlineReader::is_kept(PyObject* op, int64_t place, PyObject* value) {
  auto ask = [&] { return is_kept_(py::handle(op), place, py::handle(value)).cast<bool>(); };
  if (!is_small(value)) return ask();
  std::string key;
  put_text(key, op);
  put(key, place);
  put(key, as_int(value));
  auto it = kept_.find(key);
  if (it != kept_.end()) return it->second;
  bool found = ask();
  if (kept_.size() >= kMostViews) kept_.clear();
  return kept_[key] = found;
}

void bind_outline(py::module& m) {
  py::class_<OutlineReader>(m, "OutlineReader")
      .def(py::init<py::object, py::object, py::object>())
      .def("read", &OutlineReader::read);
}

}  // namespace torchtpu
