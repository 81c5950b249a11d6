// What each part of the extension module offers to module.cpp: one function that adds its names.
#pragma once

#include <nanobind/nanobind.h>

void bind_ring(nanobind::module_ &m);
void bind_lists(nanobind::module_ &m);
void bind_pack(nanobind::module_ &m);
