#include "launch/execute.h"

#include <array>

namespace torchtpu {

namespace py = pybind11;

namespace {

template <size_t N>
py::object call(PyObject* name, std::array<PyObject*, N> arguments, size_t positional, PyObject* keywords) {
  PyObject* made = [&]() noexcept { return PyObject_VectorcallMethod(name, arguments.data(), positional, keywords); }();
  if (!made) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

PyObject* text(const char* name) { return py::str(name).release().ptr(); }

}  // namespace

py::tuple execute(py::object executable, py::object arguments, py::object handlers) {
  static PyObject* execute_sharded = text("execute_sharded");
  static PyObject* with_tokens = py::make_tuple("with_tokens").release().ptr();
  static PyObject* consume_token = text("consume_token");
  static PyObject* consume_with_handlers = text("consume_with_handlers");
  py::object results = call<3>(execute_sharded, {executable.ptr(), arguments.ptr(), Py_True}, 2, with_tokens);
  py::object token = call<1>(consume_token, {results.ptr()}, 1, nullptr);
  py::object arrays = call<2>(consume_with_handlers, {results.ptr(), handlers.ptr()}, 2, nullptr);
  return py::make_tuple(std::move(arrays), std::move(token));
}

}  // namespace torchtpu
