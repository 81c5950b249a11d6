// The extension module penstock.runtime._native: the ring (ring_py.cpp), the list kernels (lists_py.cpp) and
// the packing of lists (pack_py.cpp).
#include "module.hpp"

NB_MODULE(_native, m) {
    // Objects that still live when a process ends are the kernel's to free; pages about them would hide what ended it.
    nanobind::set_leak_warnings(false);
    m.doc() = "Penstock's native core: the OSRBuffer ring, and hashing, partitioning and packing of whole lists.";
    bind_ring(m);
    bind_lists(m);
    bind_pack(m);
}
