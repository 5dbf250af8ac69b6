/* Device memory is zero pages of the host at addresses of its own, and copies move bytes. */
#define _GNU_SOURCE
#include "memory.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime.h"
#include "settings.h"

#define DEVICE_MEMORY_BYTES ((size_t)80 << 30)
#define FIRST_ADDRESS 0x200000000000
#define LAST_ADDRESS 0x300000000000

enum { PAGE = 4096, MAX_DATA_BYTES = 1 << 20, COPY_START_NS = 2000 };
/* Bytes per nanosecond. */
enum { HOST_LINK_RATE = 50, DEVICE_RATE = 1500 };

/* Lies in the page before the memory that cudaMalloc returns. */
struct allocation {
    size_t mapped_bytes;
    int device;
    uint64_t newest_user; /* when it was freed, the number of the newest node */
    struct allocation *next_unused;
};

/* Memory of the host that copies need not wait for. */
struct pinned {
    char *start;
    size_t bytes;
    struct pinned *next;
};

struct copy {
    void *target;
    const void *source;
    void *snapshot; /* of pageable memory, which the caller may change at once */
    size_t bytes;
    ns_t duration;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t next_address = FIRST_ADDRESS;
static size_t used_bytes;
static struct allocation *unused; /* freed memory that pending nodes may use; newest first */
static struct pinned *pinned;

bool is_device_memory(const void *pointer) {
    return (uintptr_t)pointer >= FIRST_ADDRESS && (uintptr_t)pointer < LAST_ADDRESS;
}

static bool is_pinned(const void *pointer) {
    pthread_mutex_lock(&mutex);
    struct pinned *region = pinned;
    const char *byte = pointer;
    while (region != NULL && (byte < region->start || byte >= region->start + region->bytes))
        region = region->next;
    pthread_mutex_unlock(&mutex);
    return region != NULL;
}

static void pin(void *start, size_t bytes) {
    struct pinned *region = malloc(sizeof *region);
    pthread_mutex_lock(&mutex);
    *region = (struct pinned){.start = start, .bytes = bytes, .next = pinned};
    pinned = region;
    pthread_mutex_unlock(&mutex);
}

/* Return how many bytes were pinned at an address. */
static size_t unpin(void *start) {
    size_t bytes = 0;
    pthread_mutex_lock(&mutex);
    struct pinned **link = &pinned;
    while (*link != NULL && (*link)->start != start)
        link = &(*link)->next;
    struct pinned *region = *link;
    if (region != NULL) {
        bytes = region->bytes;
        *link = region->next;
        free(region);
    }
    pthread_mutex_unlock(&mutex);
    return bytes;
}

static void *take_address(size_t bytes) {
    pthread_mutex_lock(&mutex);
    if (next_address + bytes > LAST_ADDRESS)
        next_address = FIRST_ADDRESS;
    void *address = (void *)next_address;
    next_address += bytes;
    pthread_mutex_unlock(&mutex);
    return address;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    trace("cudaMalloc", "bytes=%zu", bytes);
    if (is_forbidden_in_capture())
        return set_error(cudaErrorStreamCaptureUnsupported);
    size_t mapped_bytes = PAGE + (bytes + PAGE - 1) / PAGE * PAGE;
    pthread_mutex_lock(&mutex);
    bool is_full = used_bytes + mapped_bytes > DEVICE_MEMORY_BYTES;
    if (!is_full)
        used_bytes += mapped_bytes;
    pthread_mutex_unlock(&mutex);
    if (is_full)
        return set_error(cudaErrorMemoryAllocation);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    struct allocation *allocation;
    do { /* after the last address, the free ones from the first on are used again */
        void *address = take_address(mapped_bytes);
        allocation = mmap(address, mapped_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    } while (allocation == MAP_FAILED && errno == EEXIST);
    if (allocation == MAP_FAILED)
        return set_error(cudaErrorMemoryAllocation);
    allocation->mapped_bytes = mapped_bytes;
    cudaGetDevice(&allocation->device);
    *pointer = (char *)allocation + PAGE;
    return cudaSuccess;
}

/* CUDA waits for the device here. The stub keeps the memory until no pending node can use it:
 * without torch's cache each freed tensor comes here, and ranks would wait for each other. */
cudaError_t cudaFree(void *pointer) {
    trace("cudaFree", "address=%p", pointer);
    if (pointer == NULL)
        return cudaSuccess;
    if (!is_device_memory(pointer))
        return set_error(cudaErrorInvalidValue);
    struct allocation *allocation = (struct allocation *)((char *)pointer - PAGE);
    allocation->newest_user = newest_number();
    pthread_mutex_lock(&mutex);
    used_bytes -= allocation->mapped_bytes;
    allocation->next_unused = unused;
    unused = allocation;
    pthread_mutex_unlock(&mutex);
    lock();
    unmap_unused_memory();
    unlock();
    return cudaSuccess;
}

void unmap_unused_memory(void) {
    uint64_t oldest = oldest_pending_number();
    pthread_mutex_lock(&mutex);
    struct allocation **link = &unused;
    while (*link != NULL) {
        struct allocation *allocation = *link;
        if (allocation->newest_user < oldest) {
            *link = allocation->next_unused;
            munmap(allocation, allocation->mapped_bytes);
        } else {
            link = &allocation->next_unused;
        }
    }
    pthread_mutex_unlock(&mutex);
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    trace("cudaHostAlloc", "bytes=%zu flags=%u", bytes, flags);
    if (posix_memalign(pointer, PAGE, bytes) != 0)
        return set_error(cudaErrorMemoryAllocation);
    pin(*pointer, bytes);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *pointer) {
    unpin(pointer);
    free(pointer);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    if (is_device_memory(pointer)) {
        attributes->type = cudaMemoryTypeDevice;
        cudaGetDevice(&attributes->device); /* a process uses one device */
        attributes->devicePointer = (void *)pointer;
    } else if (is_pinned(pointer)) {
        attributes->type = cudaMemoryTypeHost;
        attributes->hostPointer = attributes->devicePointer = (void *)pointer;
    } else {
        attributes->type = cudaMemoryTypeUnregistered;
    }
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *total_bytes = DEVICE_MEMORY_BYTES;
    *free_bytes = DEVICE_MEMORY_BYTES - used_bytes;
    return cudaSuccess;
}

static void move_bytes(void *payload) {
    struct copy *copy = payload;
    bool is_on_device = is_device_memory(copy->target) && is_device_memory(copy->source);
    if (is_on_device && copy->bytes > MAX_DATA_BYTES)
        return; /* only kernels read it, and kernels do nothing */
    memmove(copy->target, copy->snapshot != NULL ? copy->snapshot : copy->source, copy->bytes);
    free(copy->snapshot);
}

static void enqueue_copy(cudaStream_t stream, const void *arguments) {
    struct copy *copy = malloc(sizeof *copy);
    memcpy(copy, arguments, sizeof *copy);
    struct node *node = stream_node(stream, NULL, copy->duration);
    node->finish = move_bytes;
    node->payload = copy;
    stream_launch(stream, node);
}

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes,
                            enum cudaMemcpyKind kind, cudaStream_t stream) {
    bool from_device = is_device_memory(source), to_device = is_device_memory(target);
    bool waits = from_device && !to_device && !is_pinned(target);
    trace("cudaMemcpyAsync", "stream=%d bytes=%zu from=%s to=%s waits=%d", stream_id(stream),
          bytes, from_device ? "device" : "host", to_device ? "device" : "host", waits);
    delay_launch();
    int rate = from_device && to_device ? DEVICE_RATE : HOST_LINK_RATE;
    struct copy copy = {.target = target, .source = source, .bytes = bytes};
    copy.duration = COPY_START_NS + (ns_t)(bytes / rate);
    if (!from_device && !is_pinned(source)) {
        copy.snapshot = malloc(bytes);
        memcpy(copy.snapshot, source, bytes);
    }
    submit(stream, enqueue_copy, &copy, sizeof copy);
    return waits ? wait_for_stream(stream) : cudaSuccess;
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind) {
    cudaMemcpyAsync(target, source, bytes, kind, NULL);
    return cudaStreamSynchronize(NULL);
}

struct filling {
    void *target;
    int value;
    size_t bytes;
};

static void fill_bytes(void *payload) {
    struct filling *filling = payload;
    if (filling->bytes <= MAX_DATA_BYTES)
        memset(filling->target, filling->value, filling->bytes);
}

static void enqueue_filling(cudaStream_t stream, const void *arguments) {
    struct filling *filling = malloc(sizeof *filling);
    memcpy(filling, arguments, sizeof *filling);
    ns_t duration = COPY_START_NS + (ns_t)(filling->bytes / DEVICE_RATE);
    struct node *node = stream_node(stream, NULL, duration);
    node->finish = fill_bytes;
    node->payload = filling;
    stream_launch(stream, node);
}

cudaError_t cudaMemsetAsync(void *target, int value, size_t bytes, cudaStream_t stream) {
    trace("cudaMemsetAsync", "stream=%d bytes=%zu", stream_id(stream), bytes);
    delay_launch();
    struct filling filling = {.target = target, .value = value, .bytes = bytes};
    submit(stream, enqueue_filling, &filling, sizeof filling);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *target, int value, size_t bytes) {
    return cudaMemsetAsync(target, value, bytes, NULL);
}
