// A fake CUDA driver: a library with the driver's symbols, so that the server's calls go through the real ABI. It records each call with
// the context that is current on the calling thread. It executes each call at once, in host memory, which stands for device memory.
// If CUDA_HEADER is defined, the compiler compares every type of this file with NVIDIA's own header.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#ifdef CUDA_HEADER
#include CUDA_HEADER
#undef cuMemcpyBatchAsync
#else
typedef int CUresult, CUdevice, CUdevice_attribute, CUpointer_attribute;
typedef unsigned long long CUdeviceptr;
typedef uint32_t cuuint32_t;
typedef struct CUctx_st* CUcontext;
typedef struct CUstream_st* CUstream;
typedef struct CUevent_st* CUevent;
typedef struct CUfunc_st* CUfunction;
struct CUuuid { char bytes[16]; };
struct CUipcMemHandle { char reserved[64]; };
struct CUipcEventHandle { char reserved[64]; };
struct CUmemLocation { int type, id; };
typedef unsigned long long CUmemGenericAllocationHandle;
typedef int CUmemAllocationHandleType;
struct CUmemAccessDesc { CUmemLocation location; int flags; };
struct CUmemcpyAttributes { int srcAccessOrder; CUmemLocation srcLocHint, dstLocHint; unsigned flags; };
#endif

static std::mutex mutex;
static std::string calls;
static std::map<std::string, int> failures;
static std::map<int, int> attributes{{91, 1}, {134, 3}};
static int num_devices = 2;
static thread_local CUcontext current;

template <class... A>
static CUresult note(const char* name, const char* format, A... arguments) {
  char text[512];
  snprintf(text, sizeof(text), format, arguments...);
  std::lock_guard<std::mutex> hold(mutex);
  calls += std::string(name) + " " + std::to_string((uintptr_t)current) + (*text ? " " : "") + text + "\n";
  auto failure = failures.find(name);
  return (CUresult)(failure == failures.end() ? 0 : failure->second);
}

#define OF(x) ((unsigned long long)(x))
#define TRY(...) do { CUresult r = note(__func__, __VA_ARGS__); if ((int)r) return r; } while (0)
#define OK ((CUresult)0)

extern "C" {

const char* fake_calls() {
  static thread_local std::string given;
  std::lock_guard<std::mutex> hold(mutex);
  given.swap(calls);
  calls.clear();
  return given.c_str();
}
void fake_fail(const char* name, int status) {
  std::lock_guard<std::mutex> hold(mutex);
  if (status) failures[name] = status;
  else failures.erase(name);
}
void fake_attribute(int attribute, int value) { attributes[attribute] = value; }
void fake_devices(int count) { num_devices = count; }

CUresult cuInit(unsigned flags) { return note(__func__, "%u", flags); }
CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = (int)error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : (int)error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : nullptr;
  return OK;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = (int)error == 700 ? "an illegal memory access was encountered" : (int)error == 2 ? "out of memory" : nullptr;
  return OK;
}
CUresult cuDeviceGetCount(int* count) { *count = num_devices; return note(__func__, ""); }
CUresult cuDeviceGet(CUdevice* device, int ordinal) { *device = ordinal + 40; return note(__func__, "%d", ordinal); }
CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  snprintf(name, length, "Fake %d", device - 40);
  return note(__func__, "%d", device);
}
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  for (int i = 0; i < 16; ++i) uuid->bytes[i] = i == 3 ? 0 : (char)(device + i);
  return note(__func__, "%d", device);
}
CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
  snprintf(id, length, "0000:%02X:00.0", device + 0x80);
  return note(__func__, "%d", device);
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  TRY("%d %d", (int)attribute, device);
  if (!attributes.count((int)attribute)) return (CUresult)1;
  *value = attributes[(int)attribute];
  return OK;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = (CUcontext)(uintptr_t)(device + 100);
  return note(__func__, "%d", device);
}
CUresult cuCtxSetCurrent(CUcontext context) { current = context; return OK; }
CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  static uintptr_t next = 0x10000000000;
  TRY("%u %d", flags, priority);
  *stream = (CUstream)(next += 16);
  return OK;
}
CUresult cuEventCreate(CUevent* event, unsigned flags) {
  static uintptr_t next = 0x20000000000;
  TRY("%u", flags);
  *event = (CUevent)(next += 16);
  return OK;
}
CUresult cuEventDestroy_v2(CUevent event) { return note(__func__, "%llu", OF(event)); }
CUresult cuEventRecord(CUevent event, CUstream stream) { return note(__func__, "%llu %llu", OF(event), OF(stream)); }
CUresult cuEventQuery(CUevent event) { return note(__func__, "%llu", OF(event)); }
CUresult cuEventSynchronize(CUevent event) { return note(__func__, "%llu", OF(event)); }
CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  TRY("%llu %llu %zu %llu", dst, src, bytes, OF(stream));
  memcpy((void*)dst, (void*)src, bytes);
  return OK;
}
CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  TRY("%zu", bytes);
  *address = (CUdeviceptr)aligned_alloc(256, (bytes + 255) / 256 * 256);
  return OK;
}
CUresult cuMemFree_v2(CUdeviceptr address) { free((void*)address); return note(__func__, "%llu", address); }
CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
  TRY("%zu %u", bytes, flags);
  *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return OK;
}
CUresult cuMemFreeHost(void* address) { free(address); return note(__func__, "%llu", OF(address)); }
CUresult cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
  return note(__func__, "%llu %zu %u", OF(address), bytes, flags);
}
CUresult cuMemHostUnregister(void* address) { return note(__func__, "%llu", OF(address)); }
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle handle, unsigned flags) {
  *address = 0x7f0000000000;
  return note(__func__, "%d %d %u", (unsigned char)handle.reserved[0], (unsigned char)handle.reserved[63], flags);
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr* start, size_t* bytes, CUdeviceptr address) {
  *start = address - 4096;
  *bytes = (size_t)6 << 30;
  return note(__func__, "%llu", address);
}
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  *(int*)value = 1;
  return note(__func__, "%d %llu", (int)attribute, address);
}
CUresult cuIpcCloseMemHandle(CUdeviceptr address) { return note(__func__, "%llu", address); }
CUresult cuIpcOpenEventHandle(CUevent* event, CUipcEventHandle handle) {
  *event = (CUevent)0x30000000010;
  return note(__func__, "%d %d", (unsigned char)handle.reserved[0], (unsigned char)handle.reserved[63]);
}
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
  *address = 0x400000000000;
  return note(__func__, "%zu %zu %llu %llu", bytes, alignment, wanted, flags);
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) { return note(__func__, "%llu %zu", address, bytes); }
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* given, CUmemAllocationHandleType kind) {
  *handle = 0x50000000000 + OF(given);
  return note(__func__, "%llu %d", OF(given), (int)kind);
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return note(__func__, "%llu", handle); }
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  return note(__func__, "%llu %zu %zu %llu %llu", address, bytes, offset, handle, flags);
}
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) { return note(__func__, "%llu %zu", address, bytes); }
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count) {
  return note(__func__, "%llu %zu %d %d %d %zu", address, bytes, (int)access->location.type, access->location.id, (int)access->flags, count);
}
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void** parameters, void** extra) {
  long long p[3];
  for (int i = 0; i < 3; ++i) p[i] = *(long long*)parameters[i];
  return note(__func__, "%llu %u,%u,%u %u,%u,%u %u %llu %lld,%lld,%lld %d", OF(function), gx, gy, gz, bx, by, bz, shared, OF(stream), p[0],
              p[1], p[2], extra == nullptr);
}

static CUresult batch(const char* name, CUdeviceptr* dst, CUdeviceptr* src, size_t* bytes, size_t count, CUmemcpyAttributes* a, size_t* at,
                      size_t n, CUstream stream) {
  CUresult r = note(name, "%zu %d,%d,%d,%d,%d,%u %zu %zu %llu", count, (int)a->srcAccessOrder, (int)a->srcLocHint.type, a->srcLocHint.id,
                    (int)a->dstLocHint.type, a->dstLocHint.id, a->flags, at[0], n, OF(stream));
  if ((int)r) return r;
  for (size_t i = 0; i < count; ++i) {
    if (bytes[i] == 0) return (CUresult)1;
    memcpy((void*)dst[i], (void*)src[i], bytes[i]);
  }
  return OK;
}
#if BATCH == 1 || defined(CUDA_HEADER)
CUresult cuMemcpyBatchAsync(CUdeviceptr* dst, CUdeviceptr* src, size_t* bytes, size_t count, CUmemcpyAttributes* a, size_t* at, size_t n,
                            size_t* failed, CUstream stream) {
  CUresult r = batch(__func__, dst, src, bytes, count, a, at, n, stream);
  if ((int)r) *failed = count - 1;
  return r;
}
#endif
#if BATCH == 2 || defined(CUDA_HEADER)
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* dst, CUdeviceptr* src, size_t* bytes, size_t count, CUmemcpyAttributes* a, size_t* at,
                               size_t n, CUstream stream) {
  return batch(__func__, dst, src, bytes, count, a, at, n, stream);
}
#endif

}  // extern "C"
