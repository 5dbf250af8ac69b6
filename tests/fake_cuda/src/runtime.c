/* Streams, events and kernels. */
#include "runtime.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "settings.h"

enum { MAX_DEVICES = 64, SETTLE_US = 50 };

static struct CUstream_st default_streams[MAX_DEVICES];
static cudaStream_t created_streams;
static atomic_int num_ids;

cudaStream_t stream_of(cudaStream_t handle) {
    if (handle != NULL && handle != cudaStreamLegacy && handle != cudaStreamPerThread)
        return handle;
    int device;
    cudaGetDevice(&device);
    return &default_streams[device];
}

int stream_id(cudaStream_t handle) {
    return stream_of(handle)->id;
}

cudaStream_t first_stream(void) {
    return created_streams;
}

struct node *stream_node(cudaStream_t stream, struct node *also_after, ns_t duration) {
    return node_new(stream->last, also_after, duration);
}

void stream_launch(cudaStream_t stream, struct node *node) {
    node_launch(node);
    node_replace(&stream->last, node);
    node_release(node);
}

void submit(cudaStream_t handle, enqueue_function *enqueue, const void *arguments, size_t size) {
    lock();
    cudaStream_t stream = stream_of(handle);
    if (stream->capture != NULL)
        capture_add(stream->capture, enqueue, arguments, size);
    else
        enqueue(stream, arguments);
    unlock();
}

cudaError_t wait_for_stream(cudaStream_t handle) {
    cudaStream_t stream = stream_of(handle);
    if (stream->capture != NULL)
        return set_error(cudaErrorStreamCaptureUnsupported);
    lock();
    struct node *last = node_retain(stream->last);
    unlock();
    if (last == NULL)
        return cudaSuccess;
    wait_for(last);
    lock();
    node_release(last);
    unlock();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
    cudaStream_t stream = calloc(1, sizeof *stream);
    stream->id = atomic_fetch_add(&num_ids, 1) + 1;
    stream->priority = priority;
    lock();
    stream->next = created_streams;
    created_streams = stream;
    unlock();
    trace("cudaStreamCreate", "stream=%d priority=%d", stream->id, priority);
    *handle = stream;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) {
    return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    trace("cudaStreamDestroy", "stream=%d", handle->id);
    lock();
    cudaStream_t *link = &created_streams;
    while (*link != handle)
        link = &(*link)->next;
    *link = handle->next;
    node_release(handle->last);
    unlock();
    free(handle);
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
    *priority = stream_of(handle)->priority;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    trace("cudaStreamSynchronize", "stream=%d", stream_id(handle));
    return wait_for_stream(handle);
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    lock();
    struct node *last = stream_of(handle)->last;
    bool is_done = last == NULL || node_is_done(last);
    unlock();
    return is_done ? cudaSuccess : cudaErrorNotReady;
}

/* Return the newest work of a process that is not done, with a reference, or NULL. */
static struct node *find_unfinished(void) {
    struct node *unfinished = stream_of(NULL)->last;
    for (cudaStream_t stream = created_streams; stream != NULL; stream = stream->next) {
        if (unfinished != NULL && !node_is_done(unfinished))
            break;
        unfinished = stream->last;
    }
    bool is_done = unfinished == NULL || node_is_done(unfinished);
    return is_done ? NULL : node_retain(unfinished);
}

cudaError_t cudaDeviceSynchronize(void) {
    trace("cudaDeviceSynchronize", " ");
    if (is_forbidden_in_capture())
        return set_error(cudaErrorStreamCaptureUnsupported);
    for (;;) {
        lock();
        struct node *unfinished = find_unfinished();
        unlock();
        if (unfinished == NULL)
            return cudaSuccess;
        wait_for(unfinished);
        lock();
        node_release(unfinished);
        unlock();
    }
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = calloc(1, sizeof **event);
    (*event)->id = atomic_fetch_add(&num_ids, 1) + 1;
    (*event)->is_timed = !(flags & cudaEventDisableTiming);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    lock();
    node_release(event->node);
    unlock();
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
    trace("cudaEventRecord", "event=%d stream=%d timed=%d", event->id, stream_id(handle),
          event->is_timed);
    lock();
    cudaStream_t stream = stream_of(handle);
    node_replace(&event->node, NULL);
    event->capture_id = stream->capture != NULL ? stream->capture->id : 0;
    if (stream->capture == NULL) {
        stream_launch(stream, stream_node(stream, NULL, 0));
        node_replace(&event->node, stream->last);
    }
    unlock();
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
    return cudaEventRecordWithFlags(event, handle, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (event->capture_id != 0)
        return set_error(cudaErrorCapturedEvent);
    if (is_forbidden_in_capture())
        return set_error(cudaErrorStreamCaptureUnsupported);
    lock();
    bool is_done = event->node == NULL || node_is_done(event->node);
    unlock();
    return is_done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    trace("cudaEventSynchronize", "event=%d", event->id);
    if (event->capture_id != 0)
        return set_error(cudaErrorCapturedEvent);
    if (event->node != NULL)
        wait_for(event->node);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    trace("cudaEventElapsedTime", "start=%d end=%d", start->id, end->id);
    if (start->node == NULL || end->node == NULL || !start->is_timed || !end->is_timed)
        return set_error(cudaErrorInvalidResourceHandle);
    lock();
    bool is_done = node_is_done(start->node) && node_is_done(end->node);
    *milliseconds = (float)(node_end(end->node) - node_end(start->node)) / 1e6f;
    unlock();
    return is_done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
    trace("cudaStreamWaitEvent", "stream=%d event=%d", stream_id(handle), event->id);
    lock();
    cudaStream_t stream = stream_of(handle);
    if (event->capture_id != 0)
        stream->capture = capture_of(event->capture_id);
    else if (stream->capture == NULL && event->node != NULL)
        stream_launch(stream, stream_node(stream, event->node, 0));
    unlock();
    return cudaSuccess;
}

/* Kernels do nothing, so the host's function may run at once. */
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *argument) {
    trace("cudaLaunchHostFunc", "stream=%d", stream_id(handle));
    function(argument);
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback,
                                  void *argument, unsigned flags) {
    callback(handle, cudaSuccess, argument);
    return cudaSuccess;
}

/* Kernels, which libraries register when they are loaded. */

struct kernel {
    const void *function;
    const char *name;
};

static struct kernel *kernels;
static size_t num_kernels, kernels_capacity;
static bool are_kernels_sorted;

static int compare_kernels(const void *left, const void *right) {
    const struct kernel *first = left, *second = right;
    return first->function < second->function ? -1 : first->function > second->function;
}

static const char *kernel_name(const void *function) {
    lock();
    if (!are_kernels_sorted)
        qsort(kernels, num_kernels, sizeof *kernels, compare_kernels);
    are_kernels_sorted = true;
    struct kernel wanted = {.function = function};
    struct kernel *kernel =
        bsearch(&wanted, kernels, num_kernels, sizeof *kernels, compare_kernels);
    unlock();
    return kernel == NULL ? "unknown" : kernel->name;
}

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}

char __cudaInitModule(void **handle) {
    return 1;
}

void __cudaRegisterFunction(void **handle, const void *function, char *device_function,
                            const char *name) {
    lock();
    if (num_kernels == kernels_capacity) {
        kernels_capacity = kernels_capacity == 0 ? 1 << 12 : 2 * kernels_capacity;
        kernels = realloc(kernels, kernels_capacity * sizeof *kernels);
    }
    kernels[num_kernels++] = (struct kernel){.function = function, .name = name};
    are_kernels_sorted = false;
    unlock();
}

static __thread struct {
    dim3 grid, block;
    size_t shared_bytes;
    void *stream;
} launch_configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *stream) {
    launch_configuration.grid = grid;
    launch_configuration.block = block;
    launch_configuration.shared_bytes = shared_bytes;
    launch_configuration.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes,
                                       void *stream) {
    *grid = launch_configuration.grid;
    *block = launch_configuration.block;
    *shared_bytes = launch_configuration.shared_bytes;
    *(void **)stream = launch_configuration.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(const void **kernel, const void *function) {
    *kernel = function;
    return cudaSuccess;
}

static void enqueue_kernel(cudaStream_t stream, const void *duration) {
    stream_launch(stream, stream_node(stream, NULL, *(const ns_t *)duration));
}

void launch_kernel(const char *name, ns_t duration, cudaStream_t handle) {
    trace("cudaLaunchKernel", "stream=%d kernel=%s", stream_id(handle), name);
    delay_launch();
    submit(handle, enqueue_kernel, &duration, sizeof duration);
}

/* torch.cuda._sleep is the one kernel whose duration matters to its caller. */
static ns_t duration_of(const char *name, void **arguments) {
    if (strstr(name, "spin_kernel") == NULL)
        return kernel_ns();
    int64_t cycles = *(int64_t *)arguments[0];
    return cycles * 1000000 / SM_CLOCK_KHZ;
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                             size_t shared_bytes, cudaStream_t handle) {
    const char *name = kernel_name(function);
    launch_kernel(name, duration_of(name, arguments), handle);
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                               size_t shared_bytes, cudaStream_t handle) {
    return cudaLaunchKernel(function, grid, block, arguments, shared_bytes, handle);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *function,
                                void **arguments) {
    return cudaLaunchKernel(function, configuration->gridDim, configuration->blockDim, arguments,
                            configuration->dynamicSmemBytes, configuration->stream);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024, .numRegs = 32, .binaryVersion = 90, .ptxVersion = 90};
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *num_blocks,
                                                                   const void *function,
                                                                   int block_size,
                                                                   size_t shared_bytes,
                                                                   unsigned flags) {
    *num_blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *num_blocks, const void *function,
                                                          int block_size, size_t shared_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(num_blocks, function, block_size,
                                                                  shared_bytes, 0);
}

/* Wait until it is known when the work of a stream ends, so that memory has its contents. */
void fake_cuda_settle(cudaStream_t handle) {
    cudaStream_t stream = stream_of(handle);
    lock();
    while (stream->last != NULL && node_end(stream->last) == UNKNOWN) {
        unlock();
        usleep(SETTLE_US);
        lock();
    }
    unlock();
}
