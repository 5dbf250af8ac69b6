/* Memory of the devices, and copies. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

bool is_device_memory(const void *pointer);
/* Requires the lock of clock.h. */
void unmap_unused_memory(void);
