/* Collectives, sends and receives of NCCL. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "communicator.h"
#include "runtime.h"
#include "settings.h"

enum { START_NS = 8000, BYTES_PER_NS = 300, MAX_GROUP = 4096 };

static const size_t itemsizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

enum kind { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, GATHER };

struct collective {
    ncclComm_t comm;
    enum kind kind;
    const void *input;
    void *output;
    size_t count; /* elements of a shard, or of the whole where there are no shards */
    ncclDataType_t type;
    ncclRedOp_t operation;
    int root;
    int slot;
};

/* Return how many bytes this rank gives to the others. */
static size_t given_bytes(const struct collective *collective) {
    bool has_shards = collective->kind == REDUCE_SCATTER || collective->kind == ALL_TO_ALL;
    int num_shards = has_shards ? collective->comm->num_ranks : 1;
    return collective->count * itemsizes[collective->type] * num_shards;
}

#define COMBINE(TYPE)                                                                              \
    do {                                                                                           \
        TYPE *sums = target;                                                                       \
        const TYPE *values = source;                                                               \
        for (size_t i = 0; i < count; i++) {                                                       \
            TYPE sum = sums[i], value = values[i];                                                 \
            if (operation == ncclProd)                                                             \
                sums[i] = sum * value;                                                             \
            else if (operation == ncclMax)                                                         \
                sums[i] = value > sum ? value : sum;                                               \
            else if (operation == ncclMin)                                                         \
                sums[i] = value < sum ? value : sum;                                               \
            else                                                                                   \
                sums[i] = sum + value;                                                             \
        }                                                                                          \
    } while (0)

static float from_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16; /* to the nearest, ties to even */
}

static void add_bfloat16(uint16_t *sums, const uint16_t *values, size_t count) {
    for (size_t i = 0; i < count; i++)
        sums[i] = to_bfloat16(from_bfloat16(sums[i]) + from_bfloat16(values[i]));
}

/* Other types of 16 and 8 bits keep the first rank's values. */
static void combine(void *target, const void *source, size_t count, ncclDataType_t type,
                    ncclRedOp_t operation) {
    switch (type) {
    case ncclUint8:
        COMBINE(uint8_t);
        break;
    case ncclInt32:
        COMBINE(int32_t);
        break;
    case ncclInt64:
        COMBINE(int64_t);
        break;
    case ncclFloat32:
        COMBINE(float);
        break;
    case ncclFloat64:
        COMBINE(double);
        break;
    case ncclBfloat16:
        add_bfloat16(target, source, count);
        break;
    default:
        break;
    }
}

/* Divide sums by the number of ranks. */
static void divide(void *sums, size_t count, ncclDataType_t type, int num_ranks) {
    float *floats = sums;
    uint16_t *bfloats = sums;
    for (size_t i = 0; i < count; i++) {
        if (type == ncclFloat32)
            floats[i] /= num_ranks;
        else if (type == ncclBfloat16)
            bfloats[i] = to_bfloat16(from_bfloat16(bfloats[i]) / num_ranks);
    }
}

static void give(void *payload) {
    const struct collective *collective = payload;
    size_t bytes = given_bytes(collective);
    if (bytes <= max_data_bytes()) {
        char *data = collective_data(collective->comm, collective->slot, collective->comm->rank);
        memcpy(data, collective->input, bytes);
    }
}

/* Reduce the shards of all ranks that begin at an offset. */
static void take_reduced(const struct collective *collective, size_t offset) {
    ncclComm_t comm = collective->comm;
    size_t bytes = collective->count * itemsizes[collective->type];
    memcpy(collective->output, collective_data(comm, collective->slot, 0) + offset, bytes);
    for (int rank = 1; rank < comm->num_ranks; rank++)
        combine(collective->output, collective_data(comm, collective->slot, rank) + offset,
                collective->count, collective->type, collective->operation);
    if (collective->operation == ncclAvg)
        divide(collective->output, collective->count, collective->type, comm->num_ranks);
}

/* Take a shard from each rank, at an offset in what the rank gave. */
static void take_shards(const struct collective *collective, size_t offset) {
    size_t bytes = collective->count * itemsizes[collective->type];
    for (int rank = 0; rank < collective->comm->num_ranks; rank++) {
        const char *data = collective_data(collective->comm, collective->slot, rank);
        memcpy((char *)collective->output + rank * bytes, data + offset, bytes);
    }
}

static void take(void *payload) {
    const struct collective *collective = payload;
    ncclComm_t comm = collective->comm;
    if (given_bytes(collective) > max_data_bytes())
        return;
    size_t shard_bytes = collective->count * itemsizes[collective->type];
    bool is_root = comm->rank == collective->root;
    switch (collective->kind) {
    case REDUCE:
        if (!is_root)
            break;
        take_reduced(collective, 0);
        break;
    case ALL_REDUCE:
        take_reduced(collective, 0);
        break;
    case REDUCE_SCATTER:
        take_reduced(collective, comm->rank * shard_bytes);
        break;
    case GATHER:
        if (!is_root)
            break;
        take_shards(collective, 0);
        break;
    case ALL_GATHER:
        take_shards(collective, 0);
        break;
    case ALL_TO_ALL:
        take_shards(collective, comm->rank * shard_bytes);
        break;
    case BROADCAST:
        memcpy(collective->output, collective_data(comm, collective->slot, collective->root),
               shard_bytes);
        break;
    }
}

static void enqueue_collective(cudaStream_t stream, const void *arguments) {
    struct collective *collective = malloc(sizeof *collective);
    memcpy(collective, arguments, sizeof *collective);
    ncclComm_t comm = collective->comm;
    int number = comm->num_collectives++;
    collective->slot = number % NUM_SLOTS;
    ns_t duration = START_NS + (ns_t)(given_bytes(collective) / BYTES_PER_NS);
    struct node *node = stream_node(stream, comm->last, comm->num_ranks > 1 ? duration : 0);
    node->meeting = &comm->shared->meetings[collective->slot];
    node->needed = comm->num_ranks * (number / NUM_SLOTS + 1);
    node->abandoned = &comm->is_aborted;
    node->arrive = give;
    node->finish = take;
    node->payload = collective;
    node_replace(&comm->last, node);
    stream_launch(stream, node);
}

/* Nothing behind this on the stream ever begins, as if a kernel hung. */
static void enqueue_hang(cudaStream_t stream, const void *arguments) {
    node_replace(&stream->last, node_that_never_ends());
}

static ncclResult_t launch_collective(const char *name, struct collective collective,
                                      cudaStream_t handle) {
    trace(name, "stream=%d bytes=%zu communicator=%s captured=%d", stream_id(handle),
          given_bytes(&collective), collective.comm->name, stream_of(handle)->capture != NULL);
    delay_launch();
    submit(handle, enqueue_collective, &collective, sizeof collective);
    if (is_last_collective())
        submit(handle, enqueue_hang, "", 1);
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *input, void *output, size_t count, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
    struct collective collective = {comm, ALL_REDUCE, input, output, count, type, operation};
    return launch_collective("ncclAllReduce", collective, stream);
}

ncclResult_t ncclReduce(const void *input, void *output, size_t count, ncclDataType_t type,
                        ncclRedOp_t operation, int root, ncclComm_t comm, cudaStream_t stream) {
    struct collective collective = {comm, REDUCE, input, output, count, type, operation, root};
    return launch_collective("ncclReduce", collective, stream);
}

ncclResult_t ncclReduceScatter(const void *input, void *output, size_t count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
    struct collective collective = {comm, REDUCE_SCATTER, input, output, count, type, operation};
    return launch_collective("ncclReduceScatter", collective, stream);
}

ncclResult_t ncclAllGather(const void *input, void *output, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    struct collective collective = {comm, ALL_GATHER, input, output, count, type};
    return launch_collective("ncclAllGather", collective, stream);
}

ncclResult_t ncclAlltoAll(const void *input, void *output, size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) {
    struct collective collective = {comm, ALL_TO_ALL, input, output, count, type};
    return launch_collective("ncclAlltoAll", collective, stream);
}

ncclResult_t ncclGather(const void *input, void *output, size_t count, ncclDataType_t type,
                        int root, ncclComm_t comm, cudaStream_t stream) {
    struct collective collective = {comm, GATHER, input, output, count, type, ncclSum, root};
    return launch_collective("ncclGather", collective, stream);
}

ncclResult_t ncclBroadcast(const void *input, void *output, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
    struct collective collective = {comm, BROADCAST, input, output, count, type, ncclSum, root};
    return launch_collective("ncclBroadcast", collective, stream);
}

ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *operation, void *scalar, ncclDataType_t type,
                                      int residence, ncclComm_t comm) {
    *operation = ncclSum;
    return ncclSuccess;
}

/* Sends and receives. Those of a group begin together, and the stream goes on after all. */

struct transfer {
    ncclComm_t comm;
    bool is_send;
    int peer;
    void *buffer;
    size_t bytes;
    struct transfer_slot *slot;
};

struct group {
    int num_transfers;
    cudaStream_t stream;
    struct transfer transfers[MAX_GROUP];
};

static __thread int group_depth;
static __thread struct group group;

static void give_message(void *payload) {
    const struct transfer *transfer = payload;
    if (transfer->is_send && transfer->bytes <= max_data_bytes())
        memcpy(transfer->slot->data, transfer->buffer, transfer->bytes);
}

static void take_message(void *payload) {
    const struct transfer *transfer = payload;
    if (!transfer->is_send && transfer->bytes <= max_data_bytes())
        memcpy(transfer->buffer, transfer->slot->data, transfer->bytes);
}

static struct node *transfer_node(cudaStream_t stream, const struct transfer *original) {
    struct transfer *transfer = malloc(sizeof *transfer);
    *transfer = *original;
    ncclComm_t comm = transfer->comm;
    int source = transfer->is_send ? comm->rank : transfer->peer;
    int target = transfer->is_send ? transfer->peer : comm->rank;
    int *counts = transfer->is_send ? comm->num_sent : comm->num_received;
    int number = counts[transfer->peer]++;
    transfer->slot = transfer_slot(comm, source, target, number);
    ns_t duration = START_NS + (ns_t)(transfer->bytes / BYTES_PER_NS);
    struct node *node = stream_node(stream, comm->last, duration);
    node->meeting = &transfer->slot->meeting;
    node->needed = 2 * (number / NUM_TRANSFER_SLOTS + 1);
    node->abandoned = &comm->is_aborted;
    node->arrive = give_message;
    node->finish = take_message;
    node->payload = transfer;
    return node;
}

static void enqueue_group(cudaStream_t stream, const void *arguments) {
    const struct group *queued = arguments;
    struct node *end = node_new(NULL, NULL, 0);
    node_launch(end);
    for (int i = 0; i < queued->num_transfers; i++) {
        struct node *node = transfer_node(stream, &queued->transfers[i]);
        node_launch(node);
        struct node *after_both = node_new(end, node, 0);
        node_launch(after_both);
        node_release(end);
        node_release(node);
        end = after_both;
    }
    node_replace(&stream->last, end);
    for (int i = 0; i < queued->num_transfers; i++)
        node_replace(&queued->transfers[i].comm->last, end);
    node_release(end);
}

static void launch_group(void) {
    if (group.num_transfers == 0)
        return;
    size_t size = offsetof(struct group, transfers[group.num_transfers]);
    submit(group.stream, enqueue_group, &group, size);
    group.num_transfers = 0;
}

static ncclResult_t launch_transfer(const char *name, struct transfer transfer,
                                    cudaStream_t stream) {
    trace(name, "stream=%d bytes=%zu communicator=%s peer=%d captured=%d", stream_id(stream),
          transfer.bytes, transfer.comm->name, transfer.peer, stream_of(stream)->capture != NULL);
    delay_launch();
    if (group.num_transfers > 0 && group.stream != stream)
        launch_group();
    if (group.num_transfers == MAX_GROUP)
        return ncclInvalidArgument;
    group.stream = stream;
    group.transfers[group.num_transfers++] = transfer;
    if (group_depth == 0)
        launch_group();
    return ncclSuccess;
}

ncclResult_t ncclSend(const void *buffer, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
    struct transfer transfer = {comm, true, peer, (void *)buffer, count * itemsizes[type]};
    return launch_transfer("ncclSend", transfer, stream);
}

ncclResult_t ncclRecv(void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    struct transfer transfer = {comm, false, peer, buffer, count * itemsizes[type]};
    return launch_transfer("ncclRecv", transfer, stream);
}

ncclResult_t ncclGroupStart(void) {
    group_depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    if (--group_depth == 0)
        launch_group();
    return ncclSuccess;
}
