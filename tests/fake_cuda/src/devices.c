/* Devices: as many as FAKE_CUDA_GPUS says, each with what torch asks of an H100. */
#include <stdio.h>
#include <string.h>

#include "runtime.h"
#include "settings.h"

enum { CUDA_VERSION_NUMBER = 13000, FIRST_PCI_BUS = 0x10, UUID_INDEX_BYTE = 3, MAX_DEVICES = 64 };

static bool is_used[MAX_DEVICES];
static __thread int current_device;
static __thread cudaError_t last_error;

cudaError_t set_error(cudaError_t error) {
    last_error = error;
    return error;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) {
    return last_error;
}

const char *cudaGetErrorName(cudaError_t error) {
    return cudaGetErrorString(error);
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorNotReady:
        return "device not ready";
    case cudaErrorStreamCaptureUnsupported:
        return "operation not permitted when stream is capturing";
    case cudaErrorCapturedEvent:
        return "operation not permitted on an event last recorded in a capturing stream";
    case cudaErrorNotSupported:
        return "the stub in tests/fake_cuda does not have this call; the trace names it";
    default:
        return "error of the stub in tests/fake_cuda";
    }
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = num_gpus();
    return *count > 0 ? cudaSuccess : set_error(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= num_gpus() || device >= MAX_DEVICES)
        return set_error(cudaErrorInvalidDevice);
    current_device = device;
    is_used[device] = true;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDA_VERSION_NUMBER;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDA_VERSION_NUMBER;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    *properties = (struct cudaDeviceProp){
        .name = "NVIDIA H100 80GB HBM3",
        .major = 9,
        .multiProcessorCount = 132,
        .totalGlobalMem = (size_t)80 << 30,
        .l2CacheSize = 50 << 20,
        .memoryBusWidth = 5120,
        .warpSize = 32,
        .maxThreadsPerBlock = 1024,
        .maxThreadsPerMultiProcessor = 2048,
        .maxBlocksPerMultiProcessor = 32,
        .maxGridSize = {2147483647, 65535, 65535},
        .maxThreadsDim = {1024, 1024, 64},
        .sharedMemPerBlock = 48 << 10,
        .sharedMemPerBlockOptin = 227 << 10,
        .sharedMemPerMultiprocessor = 228 << 10,
        .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536,
        .textureAlignment = 512,
        .concurrentKernels = 1,
        .unifiedAddressing = 1,
        .cooperativeLaunch = 1,
        .pciBusID = FIRST_PCI_BUS + device,
    };
    properties->uuid.bytes[UUID_INDEX_BYTE] = (char)device; /* as the stand-in of NVML */
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, device);
    const struct {
        enum cudaDeviceAttr attribute;
        int value;
    } known[] = {
        {cudaDevAttrComputeCapabilityMajor, properties.major},
        {cudaDevAttrComputeCapabilityMinor, properties.minor},
        {cudaDevAttrMultiProcessorCount, properties.multiProcessorCount},
        {cudaDevAttrMaxThreadsPerBlock, properties.maxThreadsPerBlock},
        {cudaDevAttrMaxThreadsPerMultiProcessor, properties.maxThreadsPerMultiProcessor},
        {cudaDevAttrMaxGridDimX, properties.maxGridSize[0]},
        {cudaDevAttrMaxGridDimY, properties.maxGridSize[1]},
        {cudaDevAttrMaxGridDimZ, properties.maxGridSize[2]},
        {cudaDevAttrMaxSharedMemoryPerBlock, (int)properties.sharedMemPerBlock},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, (int)properties.sharedMemPerBlockOptin},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, (int)properties.sharedMemPerMultiprocessor},
        {cudaDevAttrMaxRegistersPerBlock, properties.regsPerBlock},
        {cudaDevAttrWarpSize, properties.warpSize},
        {cudaDevAttrClockRate, SM_CLOCK_KHZ},
        {cudaDevAttrCooperativeLaunch, 1},
    };
    *value = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].attribute == attribute)
            *value = known[i].value;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, length, "0000:%02X:00.0", FIRST_PCI_BUS + device);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can_access, int device, int peer) {
    *can_access = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

/* Functions of the driver are optional for torch, except for those that libcuda.so.1 has. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    trace("cudaGetDriverEntryPointByVersion", "symbol=%s", symbol);
    *function = NULL;
    if (result != NULL)
        *result = cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

/* Autograd asks whether a device is in use before it starts a thread for it. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    *flags = 0;
    *is_active = is_used[device];
    return 0;
}

/* torch's cuBLAS handles want a context of the driver. Setting the device made one. */
int cuCtxGetCurrent(void **context) {
    *context = is_used;
    return 0;
}

/* The profiler turns device activities off when CUPTI fails, and asks why. */
int cuptiGetResultString(int result, const char **text) {
    *text = "the stub in tests/fake_cuda has no CUPTI";
    return 0;
}
