/* Virtual time: work on streams begins and ends at computed moments of the host's clock. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef int64_t ns_t;

enum { UNKNOWN = -1 };

/* A place in shared memory where the ranks of an operation meet. Both numbers only grow. */
struct meeting {
    _Atomic ns_t latest; /* the latest arrival so far */
    atomic_int arrived;  /* arrivals so far, of all operations that met here */
};

/* A piece of work on a stream. It begins when the host has launched it and the work before it is
 * done. If it has a meeting, it also waits for the other ranks. */
struct node {
    struct node *after[2]; /* NULL, or work that must end before */
    ns_t launched;
    ns_t duration;
    ns_t end; /* UNKNOWN as long as other ranks have not arrived */
    int references;
    uint64_t number; /* in order of launch */
    struct node *next_pending;

    struct meeting *meeting;
    int needed;                   /* arrivals at the meeting that complete it */
    bool has_arrived;
    const atomic_bool *abandoned; /* true if nobody waits at the meeting any more */

    void (*arrive)(void *payload); /* runs before this rank arrives: gives its data to the others */
    void (*finish)(void *payload); /* runs when the end is known: moves data */
    void *payload;                 /* freed with the node */
};

ns_t host_now(void);

/* One lock protects nodes, streams, events and captures of a process. */
void lock(void);
void unlock(void);

/* These require the lock. */
struct node *node_new(struct node *after, struct node *also_after, ns_t duration);
struct node *node_retain(struct node *node);
void node_release(struct node *node);
/* Let a place refer to another node, or to none. */
void node_replace(struct node **place, struct node *node);
void node_launch(struct node *node);
struct node *node_that_never_ends(void);
bool node_is_done(struct node *node);
ns_t node_end(struct node *node);
uint64_t oldest_pending_number(void);

/* These take the lock. */
void wait_for(struct node *node);
uint64_t newest_number(void);
