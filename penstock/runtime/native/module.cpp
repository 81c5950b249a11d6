// The extension module penstock.runtime._native: the ring (ring_py.cpp) and the list kernels (lists_py.cpp).
#include "module.hpp"

NB_MODULE(_native, m) {
    m.doc() = "Penstock's native core: the OSRBuffer ring, and hashing and partitioning of whole lists.";
    bind_ring(m);
    bind_lists(m);
}
