#include "launch/process_end.h"

#include <Python.h>
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pythoncapi_compat.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <initializer_list>

namespace torchtpu {

namespace {

std::terminate_handler terminate_otherwise = nullptr;

void wait_while_python_ends() {
  while (Py_IsFinalizing() && gettid() != getpid()) pause();
}

[[noreturn]] void terminate() {
  wait_while_python_ends();
  if (terminate_otherwise) terminate_otherwise();
  std::abort();
}

// Also what ends a thread of Python's in the ordinary way.
[[noreturn]] void exit_thread(void* result) {
  wait_while_python_ends();
  pthread_exit(result);
}

struct Relocations {
  const ElfW(Rela) * first = nullptr;
  size_t nbytes = 0;
};

// Where a loaded object keeps the address of a function that it imports; null where it imports no such function.
void** find_import(const link_map& object, const char* name) {
  Relocations of_calls, of_data;
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  for (const ElfW(Dyn)* entry = object.l_ld; entry->d_tag != DT_NULL; entry++) {
    auto address = entry->d_un.d_ptr;
    if (entry->d_tag == DT_JMPREL) of_calls.first = reinterpret_cast<const ElfW(Rela)*>(address);
    if (entry->d_tag == DT_PLTRELSZ) of_calls.nbytes = entry->d_un.d_val;
    if (entry->d_tag == DT_PLTREL && entry->d_un.d_val != DT_RELA) return nullptr;
    if (entry->d_tag == DT_RELA) of_data.first = reinterpret_cast<const ElfW(Rela)*>(address);
    if (entry->d_tag == DT_RELASZ) of_data.nbytes = entry->d_un.d_val;
    if (entry->d_tag == DT_SYMTAB) symbols = reinterpret_cast<const ElfW(Sym)*>(address);
    if (entry->d_tag == DT_STRTAB) names = reinterpret_cast<const char*>(address);
  }
  if (!symbols || !names) return nullptr;
  for (const auto& some : {of_calls, of_data}) {
    for (size_t i = 0; some.first && i < some.nbytes / sizeof(ElfW(Rela)); i++) {
      auto symbol = ELF64_R_SYM(some.first[i].r_info);
      if (symbol != 0 && std::strcmp(names + symbols[symbol].st_name, name) == 0)
        return reinterpret_cast<void**>(object.l_addr + some.first[i].r_offset);
    }
  }
  return nullptr;
}

}  // namespace

void install_terminate_handler() { terminate_otherwise = std::set_terminate(terminate); }

void keep_threads_from_exiting() {
#if PY_VERSION_HEX < 0x030E0000
  Dl_info info;
  link_map* python = nullptr;
  auto* of_python = reinterpret_cast<void*>(&PyThread_exit_thread);
  if (!dladdr1(of_python, &info, reinterpret_cast<void**>(&python), RTLD_DL_LINKMAP) || !python) return;
  void** slot = find_import(*python, "pthread_exit");
  if (!slot) return;
  auto page_size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  auto page = reinterpret_cast<uintptr_t>(slot) / page_size * page_size;
  if (mprotect(reinterpret_cast<void*>(page), page_size, PROT_READ | PROT_WRITE) != 0) return;  // the loader's, by now
  *slot = reinterpret_cast<void*>(&exit_thread);
#endif
}

void exit_as_interrupted() {
  on_exit(
      [](int status, void*) {
        if (status != 1) return;
        fflush(nullptr);
        std::signal(SIGINT, SIG_DFL);
        kill(getpid(), SIGINT);
      },
      nullptr);
}

void exit_without_destructors() {
  on_exit(
      [](int status, void*) {
        fflush(nullptr);
        _exit(status);
      },
      nullptr);
}

}  // namespace torchtpu
