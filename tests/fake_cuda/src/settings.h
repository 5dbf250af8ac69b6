/* Settings of the stub, from environment variables that README.md describes, and the trace. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "clock.h"

int num_gpus(void);
ns_t kernel_ns(void);
const char *communicator_folder(void);
/* Bytes of a rank in an operation of NCCL that are moved. What is longer has no contents. */
size_t max_data_bytes(void);

/* The rank of this process: that of its first communicator. */
void set_rank(int rank);

/* Spend the extra time of a launch, if this is the slow rank. */
void delay_launch(void);
/* Count a collective, and return whether the device of this rank hangs behind it. */
bool is_last_collective(void);

/* Append a line to this process's trace: time, thread, call, and words such as "stream=3". */
void trace(const char *call, const char *format, ...) __attribute__((format(printf, 2, 3)));
