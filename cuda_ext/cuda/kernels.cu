// The only file that nvcc compiles: everything, with the functions of launchers.h for others to link.
#include "launch_rules.cuh"
