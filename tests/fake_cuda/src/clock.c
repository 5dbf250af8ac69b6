/* Nodes and the thread that computes when they end. */
#include "clock.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "memory.h"

enum { POLL_US = 50, SPIN_NS = 60000 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t has_pending = PTHREAD_COND_INITIALIZER;
static bool has_thread;
static uint64_t num_launched;
/* Nodes whose end is unknown, in order of launch, so that a node stands behind what it waits for. */
static struct node *first_pending;
static struct node **last_pending = &first_pending;

ns_t host_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

void lock(void) {
    pthread_mutex_lock(&mutex);
}

void unlock(void) {
    pthread_mutex_unlock(&mutex);
}

/* A fork has none of its parent's threads, and the parent of ranks has launched nothing. */
static void forget_after_fork(void) {
    pthread_mutex_init(&mutex, NULL);
    pthread_cond_init(&has_pending, NULL);
    has_thread = false;
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, forget_after_fork);
}

struct node *node_retain(struct node *node) {
    if (node != NULL)
        node->references++;
    return node;
}

void node_release(struct node *node) {
    if (node == NULL || --node->references > 0)
        return;
    free(node->payload);
    free(node);
}

void node_replace(struct node **place, struct node *node) {
    node_retain(node);
    node_release(*place);
    *place = node;
}

struct node *node_new(struct node *after, struct node *also_after, ns_t duration) {
    struct node *node = calloc(1, sizeof *node);
    node->after[0] = node_retain(after);
    node->after[1] = node_retain(also_after);
    node->launched = host_now();
    node->duration = duration;
    node->end = UNKNOWN;
    node->references = 1;
    node->number = ++num_launched;
    return node;
}

/* Return a node that stands for a kernel that hangs. */
struct node *node_that_never_ends(void) {
    static struct node hanging = {.end = UNKNOWN, .references = 1};
    return &hanging;
}

static void arrive(struct node *node, ns_t begin) {
    if (node->arrive != NULL)
        node->arrive(node->payload);
    ns_t latest = atomic_load(&node->meeting->latest);
    while (latest < begin && !atomic_compare_exchange_weak(&node->meeting->latest, &latest, begin))
        ;
    atomic_fetch_add(&node->meeting->arrived, 1);
    node->has_arrived = true;
}

/* Compute when the node ends, if that can be known. */
static bool try_to_end(struct node *node) {
    ns_t begin = node->launched;
    for (int i = 0; i < 2; i++) {
        struct node *before = node->after[i];
        if (before != NULL && before->end == UNKNOWN)
            return false;
        if (before != NULL && before->end > begin)
            begin = before->end;
    }
    bool is_complete = true;
    if (node->meeting != NULL) {
        if (!node->has_arrived)
            arrive(node, begin);
        is_complete = atomic_load(&node->meeting->arrived) >= node->needed;
        if (is_complete)
            begin = atomic_load(&node->meeting->latest);
        else if (atomic_load(node->abandoned))
            begin = host_now();
        else
            return false;
    }
    if (is_complete && node->finish != NULL)
        node->finish(node->payload);
    node->end = begin + node->duration;
    for (int i = 0; i < 2; i++) {
        node_release(node->after[i]);
        node->after[i] = NULL;
    }
    return true;
}

/* Compute all ends that can be known by now. */
static void update_pending(void) {
    struct node **link = &first_pending;
    while (*link != NULL) {
        struct node *node = *link;
        if (try_to_end(node)) {
            *link = node->next_pending;
            node_release(node);
        } else {
            link = &node->next_pending;
        }
    }
    last_pending = link;
    unmap_unused_memory();
}

/* Other ranks wait for this rank's arrivals while it computes something on the host. */
static void *keep_updating(void *unused) {
    lock();
    for (;;) {
        while (first_pending == NULL)
            pthread_cond_wait(&has_pending, &mutex);
        update_pending();
        unlock();
        usleep(POLL_US);
        lock();
    }
    return unused;
}

static void start_thread(void) {
    sigset_t all_signals, previous;
    sigfillset(&all_signals);
    pthread_sigmask(SIG_SETMASK, &all_signals, &previous); /* signals are Python's */
    pthread_t thread;
    has_thread = pthread_create(&thread, NULL, keep_updating, NULL) == 0;
    pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &previous, NULL);
}

void node_launch(struct node *node) {
    if (first_pending != NULL)
        update_pending();
    if (try_to_end(node))
        return;
    *last_pending = node_retain(node);
    last_pending = &node->next_pending;
    if (!has_thread)
        start_thread();
    pthread_cond_signal(&has_pending);
}

ns_t node_end(struct node *node) {
    if (node == NULL)
        return 0;
    if (node->end == UNKNOWN)
        update_pending();
    return node->end;
}

bool node_is_done(struct node *node) {
    ns_t end = node_end(node);
    return end != UNKNOWN && end <= host_now();
}

void wait_for(struct node *node) {
    lock();
    node_retain(node);
    for (;;) {
        ns_t end = node_end(node);
        ns_t left = end - host_now();
        if (end != UNKNOWN && left <= 0)
            break;
        unlock();
        if (end == UNKNOWN)
            usleep(POLL_US);
        else if (left > SPIN_NS) /* a sleep ends late by about so much */
            usleep((left - SPIN_NS) / 1000);
        lock();
    }
    node_release(node);
    unlock();
}

uint64_t oldest_pending_number(void) {
    return first_pending == NULL ? UINT64_MAX : first_pending->number;
}

uint64_t newest_number(void) {
    lock();
    uint64_t number = num_launched;
    unlock();
    return number;
}
