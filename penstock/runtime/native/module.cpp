// The extension module penstock.runtime._native: the ring (ring_py.cpp), the list kernels (lists_py.cpp) and
// the packing of lists (pack_py.cpp).
#include "module.hpp"

NB_MODULE(_native, m) {
    // The kernel frees objects that exist when a process ends. Reports about them would hide the error that ended it.
    nanobind::set_leak_warnings(false);
    m.doc() = "Penstock's native core: the OSRBuffer ring, and hashing, partitioning and packing of whole lists.";
    bind_ring(m);
    bind_lists(m);
    bind_pack(m);
}
