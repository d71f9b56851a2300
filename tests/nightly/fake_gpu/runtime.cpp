// A CUDA runtime without a GPU: memory is the host's, kernels do nothing, and everything is done at once. So PyTorch's own host
// code runs: its allocator, autograd, streams and graphs, and our launches. What kernels would have written stays as it is.
//
// FAKE_GPU_LOG names a file that gets a line for each call that gives a GPU work: a kernel (its name, blocks, threads and
// bytes of shared memory), cuBLAS, a copy, a fill, or a graph. A capture takes no work, and refuses to wait for any.
//
// fake_gpu.py adds all other functions of the library, which return success and nothing else.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

// The headers give these another name.
#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo

namespace {

constexpr size_t kMemory = size_t(80) << 30;
constexpr int kMultiprocessors = 132, kThreads = 1024, kSharedBytes = 227 * 1024;  // of an H100

struct Block {
  size_t bytes;
  cudaMemoryType type;
};

std::mutex mutex;
std::map<const char*, Block> blocks;  // by their start
std::map<const void*, std::string> kernels;
size_t used = 0;
bool captures = false, spoiled = false;  // whether work is captured now, and whether something has waited for it

cudaError_t allocate(void** block, size_t bytes, cudaMemoryType type) {
  const std::lock_guard<std::mutex> guard(mutex);
  // New pages are zeros, so values are finite, and a test that asks for 80 GB gets only what it uses.
  *block = std::aligned_alloc(4096, (bytes + 4096) / 4096 * 4096);
  if (!*block || used + bytes > kMemory) return cudaErrorMemoryAllocation;
  blocks[static_cast<char*>(*block)] = {bytes, type};
  used += bytes;
  return cudaSuccess;
}

cudaError_t release(void* block) {
  const std::lock_guard<std::mutex> guard(mutex);
  const auto found = blocks.find(static_cast<char*>(block));
  if (found == blocks.end()) return cudaSuccess;
  used -= found->second.bytes;
  blocks.erase(found);
  std::free(block);
  return cudaSuccess;
}

template <typename Handle>
cudaError_t make(Handle* handle) {
  *handle = reinterpret_cast<Handle>(new char);
  return cudaSuccess;
}

cudaError_t nothing() { return cudaSuccess; }

// Return what a call gets that waits for work.
cudaError_t wait() {
  if (!captures) return cudaSuccess;
  return spoiled = true, cudaErrorStreamCaptureUnsupported;
}

}  // namespace

extern "C" {

// Add a line to the log, unless the work is captured. The stubs of cuBLAS call it, too.
void fake_gpu_note(const char* what) {
  const char* const path = std::getenv("FAKE_GPU_LOG");
  if (!path || captures) return;
  const std::lock_guard<std::mutex> guard(mutex);
  std::ofstream(path, std::ios::app) << what << '\n';
}

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) { return error ? "an error of the fake GPU" : "no error"; }
const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "fake GPU");
  properties->major = 9, properties->warpSize = 32, properties->multiProcessorCount = kMultiprocessors;
  properties->totalGlobalMem = kMemory, properties->maxThreadsPerBlock = kThreads;
  properties->maxThreadsPerMultiProcessor = 2 * kThreads, properties->regsPerBlock = 65536;
  properties->sharedMemPerBlock = 48 * 1024, properties->sharedMemPerBlockOptin = kSharedBytes;
  properties->l2CacheSize = 50 << 20;
  for (int i = 0; i < 3; ++i) properties->maxThreadsDim[i] = kThreads, properties->maxGridSize[i] = 65535;
  properties->maxGridSize[0] = 0x7fffffff;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: return *value = kMultiprocessors, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return *value = kSharedBytes, cudaSuccess;
    case cudaDevAttrMaxThreadsPerBlock: return *value = kThreads, cudaSuccess;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return *value = 2 * kThreads, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock: return *value = 48 * 1024, cudaSuccess;
    case cudaDevAttrWarpSize: return *value = 32, cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: return *value = 9, cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: return *value = 0, cudaSuccess;
    default: return *value = 1, cudaSuccess;
  }
}

cudaError_t cudaMalloc(void** block, size_t bytes) { return allocate(block, bytes, cudaMemoryTypeDevice); }
cudaError_t cudaMallocAsync(void** block, size_t bytes, cudaStream_t) { return cudaMalloc(block, bytes); }
cudaError_t cudaHostAlloc(void** block, size_t bytes, unsigned) { return allocate(block, bytes, cudaMemoryTypeHost); }
cudaError_t cudaFree(void* block) { return release(block); }
cudaError_t cudaFreeAsync(void* block, cudaStream_t) { return release(block); }
cudaError_t cudaFreeHost(void* block) { return release(block); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { return *total = kMemory, *free = kMemory - used, cudaSuccess; }

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  const std::lock_guard<std::mutex> guard(mutex);
  std::memset(found, 0, sizeof *found);
  const auto after = blocks.upper_bound(static_cast<const char*>(address));
  if (after == blocks.begin()) return cudaSuccess;
  const auto block = std::prev(after);
  if (static_cast<const char*>(address) < block->first + block->second.bytes) found->type = block->second.type;
  found->devicePointer = found->hostPointer = const_cast<void*>(address);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  fake_gpu_note("cudaMemcpyAsync");
  return std::memmove(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return captures ? wait() : cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  fake_gpu_note("cudaMemsetAsync");
  return std::memset(to, value, bytes), cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }
cudaError_t cudaDeviceSynchronize() { return wait(); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return wait(); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return wait(); }
cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static void* const block = std::calloc(1, 1 << 20);
  return *address = block, cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return make(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return make(stream); }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* event) { return make(event); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return make(event); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  return *milliseconds = 1, cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { return make(pool); }
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
  return std::strncpy(text, "0000:00:00.0", size_t(size)), cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  if (id) *id = 1;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  return captures = true, spoiled = false, cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  captures = false;
  return spoiled ? cudaErrorStreamCaptureInvalidated : make(graph);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return fake_gpu_note("cudaGraphLaunch"), cudaSuccess; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* graph, cudaGraph_t, unsigned long long) { return make(graph); }
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) { return *count = 1, cudaSuccess; }

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  kernels[host] = name;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* bytes, void* stream) {
  *grid = *block = dim3(1), *bytes = 0;
  return std::memset(stream, 0, sizeof(void*)), cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  return *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host)), cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = kThreads, attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90, attributes->maxDynamicSharedSizeBytes = kSharedBytes;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  return *blocks = 2, cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int value) {
  return value <= kSharedBytes ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t bytes, cudaStream_t) {
  std::ostringstream line;
  line << kernels[kernel] << ' ' << grid.x << ' ' << block.x << ' ' << bytes;
  return fake_gpu_note(line.str().c_str()), cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** inputs, size_t bytes, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, inputs, bytes, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** inputs) {
  return cudaLaunchKernel(kernel, config->gridDim, config->blockDim, inputs, config->dynamicSmemBytes, config->stream);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* data) { return call(data), cudaSuccess; }
// A driver's function, of any type: PyTorch calls few, and none without a GPU of its own.
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&nothing);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
