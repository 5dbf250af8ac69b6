/* Communicators of NCCL, which are files in shared memory. */
#pragma once

#include "clock.h"
#include "nccl.h"

enum { MAX_RANKS = 64, NUM_SLOTS = 4, NUM_TRANSFER_SLOTS = 256 };

/* A message from one rank to another. */
struct transfer_slot {
    struct meeting meeting;
    char data[]; /* max_data_bytes */
};

/* The head of the file. The data of collectives and the slots of transfers follow.
 *
 * Operation k uses slot k % NUM_SLOTS. No slot is reset: a rank that arrives at operation k+2 knows
 * that all have arrived at k+1, so all have read what was given in k. */
struct shared {
    atomic_int num_joined, num_left;
    atomic_int num_entered_split, num_left_split;
    int colors[MAX_RANKS], keys[MAX_RANKS];
    struct meeting meetings[NUM_SLOTS];
};

struct ncclComm {
    int num_ranks, rank, device;
    char name[96];
    struct shared *shared;
    atomic_bool is_aborted;
    struct node *last; /* operations of a communicator follow each other on all streams */
    int num_collectives, num_splits;
    int num_sent[MAX_RANKS], num_received[MAX_RANKS];
};

char *collective_data(ncclComm_t comm, int slot, int rank);
struct transfer_slot *transfer_slot(ncclComm_t comm, int source, int target, int number);
