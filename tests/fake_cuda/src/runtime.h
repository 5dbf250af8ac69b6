/* Streams, events and captures. */
#pragma once

#include <cuda_runtime_api.h>
#include <pthread.h>

#include "clock.h"

enum { SM_CLOCK_KHZ = 1980000 };

/* A call of cudaStreamBeginCapture and the streams that joined it by waiting for its events. */
struct capture {
    unsigned long long id;
    cudaStream_t origin;
    pthread_t thread;
    enum cudaStreamCaptureMode mode;
    cudaGraph_t graph;
    struct capture *next;
};

struct CUstream_st {
    int id;
    int priority;
    struct node *last; /* the newest work */
    struct capture *capture;
    struct CUstream_st *next;
};

struct CUevent_st {
    int id;
    bool is_timed;
    struct node *node; /* NULL if it was never recorded */
    unsigned long long capture_id; /* of the capture in which it was recorded, or 0 */
};

/* Puts work on a stream. Graphs keep it with a copy of its arguments, and call it for each replay. */
typedef void enqueue_function(cudaStream_t stream, const void *arguments);

/* Return the stream that a handle means, which is the default stream for NULL. */
cudaStream_t stream_of(cudaStream_t handle);
int stream_id(cudaStream_t handle);
/* Enqueue now, or put it into the graph that the stream captures. Takes the lock. */
void submit(cudaStream_t handle, enqueue_function *enqueue, const void *arguments, size_t size);
cudaError_t wait_for_stream(cudaStream_t handle);

/* These require the lock. */
struct node *stream_node(cudaStream_t stream, struct node *also_after, ns_t duration);
void stream_launch(cudaStream_t stream, struct node *node);

/* Return whether this thread captures in a mode that forbids calls which may wait for the device. */
bool is_forbidden_in_capture(void);
/* These require the lock. */
struct capture *capture_of(unsigned long long id);
void capture_add(struct capture *capture, enqueue_function *enqueue, const void *arguments,
                 size_t size);

/* The streams of this process. Requires the lock. */
cudaStream_t first_stream(void);

/* Put a kernel on a stream. Takes the lock. */
void launch_kernel(const char *name, ns_t duration, cudaStream_t handle);

/* Remember an error for cudaGetLastError, and return it. */
cudaError_t set_error(cudaError_t error);
