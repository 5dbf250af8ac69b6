/* How ranks make, split and leave communicators. */
#include "communicator.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime.h"
#include "settings.h"

enum { WAIT_US = 100, MAX_PATH = 512, PAGE = 4096 };

static size_t data_offset(void) {
    return (sizeof(struct shared) + PAGE - 1) / PAGE * PAGE;
}

static size_t transfers_offset(int num_ranks) {
    return data_offset() + NUM_SLOTS * num_ranks * max_data_bytes();
}

/* The size of a slot leaves data aligned. */
static size_t transfer_slot_bytes(void) {
    return (sizeof(struct transfer_slot) + max_data_bytes() + PAGE - 1) / PAGE * PAGE;
}

static size_t file_bytes(int num_ranks) {
    size_t num_slots = (size_t)num_ranks * num_ranks * NUM_TRANSFER_SLOTS;
    return transfers_offset(num_ranks) + num_slots * transfer_slot_bytes();
}

char *collective_data(ncclComm_t comm, int slot, int rank) {
    size_t number = (size_t)slot * comm->num_ranks + rank;
    return (char *)comm->shared + data_offset() + number * max_data_bytes();
}

struct transfer_slot *transfer_slot(ncclComm_t comm, int source, int target, int number) {
    char *start = (char *)comm->shared + transfers_offset(comm->num_ranks);
    size_t pair = (size_t)source * comm->num_ranks + target;
    size_t index = pair * NUM_TRANSFER_SLOTS + number % NUM_TRANSFER_SLOTS;
    return (struct transfer_slot *)(start + index * transfer_slot_bytes());
}

static void format_path(char path[MAX_PATH], const char *name) {
    snprintf(path, MAX_PATH, "%s/communicator-%s", communicator_folder(), name);
}

/* Map the file, whose pages exist once they are written. */
static struct shared *map_shared(const char *name, int num_ranks) {
    char path[MAX_PATH];
    format_path(path, name);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, file_bytes(num_ranks)) != 0)
        return NULL;
    int flags = MAP_SHARED | MAP_NORESERVE;
    void *shared = mmap(NULL, file_bytes(num_ranks), PROT_READ | PROT_WRITE, flags, file, 0);
    close(file);
    return shared == MAP_FAILED ? NULL : shared;
}

static void wait_for_count(atomic_int *count, int needed) {
    while (atomic_load(count) < needed)
        usleep(WAIT_US);
}

static ncclResult_t make_communicator(ncclComm_t *comm, const char *name, int num_ranks, int rank) {
    trace("ncclCommInit", "communicator=%s rank=%d ranks=%d", name, rank, num_ranks);
    if (num_ranks > MAX_RANKS)
        return ncclInvalidArgument;
    struct ncclComm *made = calloc(1, sizeof *made);
    made->num_ranks = num_ranks;
    made->rank = rank;
    cudaGetDevice(&made->device);
    snprintf(made->name, sizeof made->name, "%s", name);
    made->shared = map_shared(name, num_ranks);
    if (made->shared == NULL)
        return ncclSystemError;
    set_rank(rank);
    atomic_fetch_add(&made->shared->num_joined, 1);
    wait_for_count(&made->shared->num_joined, num_ranks);
    trace("ncclCommInit done", "communicator=%s", name);
    *comm = made;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static atomic_int num_ids;
    memset(id, 0, sizeof *id);
    int number = atomic_fetch_add(&num_ids, 1);
    snprintf(id->internal, sizeof id->internal, "%d.%d", getpid(), number);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int num_ranks, ncclUniqueId id, int rank) {
    return make_communicator(comm, id.internal, num_ranks, rank);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int num_ranks, ncclUniqueId id, int rank,
                                    void *config) {
    return make_communicator(comm, id.internal, num_ranks, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int num_ranks, int rank, int num_ids,
                                      ncclUniqueId *ids, void *config) {
    return make_communicator(comm, ids->internal, num_ranks, rank);
}

/* Return this rank's place in the part of its color, whose ranks are ordered by key. */
static int place_in_part(ncclComm_t parent, int *num_ranks) {
    const struct shared *shared = parent->shared;
    int own = parent->rank, place = 0;
    *num_ranks = 0;
    for (int rank = 0; rank < parent->num_ranks; rank++) {
        if (shared->colors[rank] != shared->colors[own])
            continue;
        int difference = shared->keys[rank] - shared->keys[own];
        place += difference < 0 || (difference == 0 && rank < own);
        ++*num_ranks;
    }
    return place;
}

/* All ranks of the parent meet, those without a color too. */
ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *comm, void *config) {
    struct shared *shared = parent->shared;
    int number = parent->num_splits++, num_calls = parent->num_ranks * (number + 1);
    trace("ncclCommSplit", "communicator=%s color=%d", parent->name, color);
    shared->colors[parent->rank] = color;
    shared->keys[parent->rank] = key;
    atomic_fetch_add(&shared->num_entered_split, 1);
    wait_for_count(&shared->num_entered_split, num_calls);
    int num_ranks, place = place_in_part(parent, &num_ranks);
    atomic_fetch_add(&shared->num_left_split, 1); /* the next split may overwrite the colors */
    wait_for_count(&shared->num_left_split, num_calls);
    trace("ncclCommSplit done", "communicator=%s", parent->name);
    *comm = NULL;
    if (color == NCCL_SPLIT_NOCOLOR)
        return ncclSuccess;
    char name[sizeof parent->name];
    int length = snprintf(name, sizeof name, "%s.%d-%d", parent->name, number, color);
    if (length >= (int)sizeof name)
        return ncclInvalidArgument;
    return make_communicator(comm, name, num_ranks, place);
}

/* The memory of a communicator stays, because graphs may keep its operations. */
static void leave(ncclComm_t comm) {
    if (atomic_fetch_add(&comm->shared->num_left, 1) + 1 < comm->num_ranks)
        return;
    char path[MAX_PATH];
    format_path(path, comm->name);
    unlink(path);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    trace("ncclCommDestroy", "communicator=%s", comm->name);
    if (comm->last != NULL)
        wait_for(comm->last);
    leave(comm);
    munmap(comm->shared, file_bytes(comm->num_ranks));
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    trace("ncclCommAbort", "communicator=%s", comm->name);
    atomic_store(&comm->is_aborted, true);
    leave(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int *count) {
    *count = comm->num_ranks;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) {
    *rank = comm->rank;
    return ncclSuccess;
}

/* A peer that is gone is no error either: NCCL finds out by its connections, which are not here. */
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    *error = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void **pointer, size_t bytes) {
    return cudaMalloc(pointer, bytes) == cudaSuccess ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclMemFree(void *pointer) {
    return cudaFree(pointer) == cudaSuccess ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    return result == ncclSuccess ? "no error" : "error of the stub in tests/fake_cuda";
}

const char *ncclGetLastError(ncclComm_t comm) {
    return "";
}
