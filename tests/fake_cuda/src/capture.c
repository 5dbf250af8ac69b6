/* Stream capture and graphs. A graph is a list of work, and a replay runs it in order of capture. */
#include <stdlib.h>
#include <string.h>

#include "runtime.h"
#include "settings.h"

struct command {
    enqueue_function *enqueue;
    void *arguments;
    struct command *next;
};

/* Stands for a graph and for its executable, which have the same commands. It is never freed: a
 * process of a test makes few. */
struct CUgraph_st {
    struct command *first;
    struct command **last;
    int num_commands;
};

static struct capture *captures; /* the active ones */
static unsigned long long num_captures;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

struct capture *capture_of(unsigned long long id) {
    struct capture *capture = captures;
    while (capture != NULL && capture->id != id)
        capture = capture->next;
    return capture;
}

void capture_add(struct capture *capture, enqueue_function *enqueue, const void *arguments,
                 size_t size) {
    struct command *command = calloc(1, sizeof *command);
    command->enqueue = enqueue;
    command->arguments = malloc(size);
    memcpy(command->arguments, arguments, size);
    *capture->graph->last = command;
    capture->graph->last = &command->next;
    capture->graph->num_commands++;
}

bool is_forbidden_in_capture(void) {
    if (captures == NULL || thread_mode == cudaStreamCaptureModeRelaxed)
        return false;
    lock();
    bool is_forbidden = false;
    for (struct capture *capture = captures; capture != NULL; capture = capture->next) {
        bool is_own = pthread_equal(capture->thread, pthread_self());
        is_forbidden |= capture->mode == cudaStreamCaptureModeGlobal ||
                        (is_own && capture->mode == cudaStreamCaptureModeThreadLocal);
    }
    unlock();
    return is_forbidden;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode previous = thread_mode;
    thread_mode = *mode;
    *mode = previous;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    trace("cudaStreamBeginCapture", "stream=%d mode=%d", stream_id(handle), mode);
    struct capture *capture = calloc(1, sizeof *capture);
    capture->origin = stream_of(handle);
    capture->thread = pthread_self();
    capture->mode = mode;
    capture->graph = calloc(1, sizeof *capture->graph);
    capture->graph->last = &capture->graph->first;
    lock();
    capture->id = ++num_captures;
    capture->next = captures;
    captures = capture;
    capture->origin->capture = capture;
    unlock();
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    lock();
    struct capture *capture = stream_of(handle)->capture;
    if (capture == NULL || capture->origin != stream_of(handle)) {
        unlock();
        return set_error(cudaErrorStreamCaptureUnmatched);
    }
    struct capture **link = &captures;
    while (*link != capture)
        link = &(*link)->next;
    *link = capture->next;
    for (cudaStream_t stream = first_stream(); stream != NULL; stream = stream->next)
        if (stream->capture == capture)
            stream->capture = NULL;
    capture->origin->capture = NULL;
    unlock();
    *graph = capture->graph;
    trace("cudaStreamEndCapture", "stream=%d nodes=%d", stream_id(handle),
          capture->graph->num_commands);
    free(capture);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    bool is_capturing = stream_of(handle)->capture != NULL;
    *status = is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *num_dependencies) {
    cudaStreamIsCapturing(handle, status);
    struct capture *capture = stream_of(handle)->capture;
    if (id != NULL && capture != NULL)
        *id = capture->id;
    if (graph != NULL && capture != NULL)
        *graph = capture->graph;
    if (dependencies != NULL)
        *dependencies = NULL;
    if (edges != NULL)
        *edges = NULL;
    if (num_dependencies != NULL)
        *num_dependencies = 0;
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *num_nodes) {
    *num_nodes = graph->num_commands;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph,
                                          unsigned long long flags) {
    *executable = (cudaGraphExec_t)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
    cudaGraph_t graph = (cudaGraph_t)executable;
    trace("cudaGraphLaunch", "stream=%d nodes=%d", stream_id(handle), graph->num_commands);
    delay_launch();
    lock();
    cudaStream_t stream = stream_of(handle);
    for (struct command *command = graph->first; command != NULL; command = command->next)
        command->enqueue(stream, command->arguments);
    unlock();
    return cudaSuccess;
}
