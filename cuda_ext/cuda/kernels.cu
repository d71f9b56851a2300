// The only file that nvcc compiles. It includes all kernels and defines the functions of launchers.h for the linker.
#include "launch_rules.cuh"
