/* A libnvidia-ml.so.1 of a machine with given GPUs.

   It reads `nvml.txt` in its own folder: lines of a key and a value, such as `0.power_limit 700000` for
   GPU 0. A value `error 15` makes the call return this code. A key that is missing makes it return
   "not supported". The value `hang` makes a call wait forever. tests/support/nvidia.py writes it.
   Each process that uses the library adds a line to `nvml.log`. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS, NOT_FOUND = 6, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };
typedef void *Device;
typedef unsigned long long Wide;

static char facts[1 << 20];

static int gpu_of(Device device) {
    return (int)(size_t)device - 1;
}

static void load(void) {
    Dl_info info;
    char path[4096];
    dladdr((void *)load, &info);
    snprintf(path, sizeof path, "%s", info.dli_fname);
    strcpy(strrchr(path, '/') + 1, "nvml.txt");
    FILE *file = fopen(path, "r");
    facts[fread(facts, 1, sizeof facts - 1, file)] = 0;
    fclose(file);
    strcpy(strrchr(path, '/') + 1, "nvml.log");
    file = fopen(path, "a");
    fprintf(file, "%d\n", getpid());
    fclose(file);
}

/* Copies the value of a key, and returns the code of the call. */
static int find(const char *key, char *value, size_t size) {
    size_t length = strlen(key);
    for (const char *line = facts; *line; line = strchr(line, '\n') + 1) {
        if (strncmp(line, key, length) || line[length] != ' ')
            continue;
        snprintf(value, size, "%.*s", (int)(strcspn(line, "\n") - length - 1), line + length + 1);
        while (!strcmp(value, "hang"))
            pause();
        return strncmp(value, "error ", 6) ? SUCCESS : atoi(value + 6);
    }
    return NOT_SUPPORTED;
}

static int find_text(Device device, const char *name, char *text, unsigned size) {
    char key[64];
    snprintf(key, sizeof key, "%d.%s", gpu_of(device), name);
    return find(key, text, size);
}

static int find_wide(Device device, const char *name, Wide *number) {
    char text[64];
    int code = find_text(device, name, text, sizeof text);
    if (code == SUCCESS)
        *number = strtoull(text, NULL, 0);
    return code;
}

static int find_number(Device device, const char *name, unsigned *number) {
    Wide wide = 0;
    int code = find_wide(device, name, &wide);
    *number = (unsigned)wide;
    return code;
}

static int find_indexed(Device device, const char *name, int index, unsigned *number) {
    char key[64];
    snprintf(key, sizeof key, "%s.%d", name, index);
    return find_number(device, key, number);
}

int nvmlInitWithFlags(unsigned flags) {
    char text[64];
    load();
    int code = find("init", text, sizeof text);
    return code == NOT_SUPPORTED ? SUCCESS : code;
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    return find("driver", text, size);
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    char text[64];
    int code = find("count", text, sizeof text);
    *count = atoi(text);
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    char text[64];
    *device = (Device)(size_t)(index + 1);
    int code = find_text(*device, "handle", text, sizeof text);
    return code == NOT_SUPPORTED ? SUCCESS : code;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) {
    char text[96];
    for (unsigned index = 0; index < 64; index++) {
        *device = (Device)(size_t)(index + 1);
        if (find_text(*device, "uuid", text, sizeof text) == SUCCESS && !strcmp(text, uuid))
            return nvmlDeviceGetHandleByIndex_v2(index, device);
    }
    return NOT_FOUND;
}

int nvmlDeviceGetName(Device device, char *text, unsigned size) {
    return find_text(device, "name", text, size);
}

int nvmlDeviceGetUUID(Device device, char *text, unsigned size) {
    return find_text(device, "uuid", text, size);
}

struct memory {
    unsigned version;
    Wide total, reserved, free, used;
};

int nvmlDeviceGetMemoryInfo_v2(Device device, struct memory *memory) {
    int code = find_wide(device, "memory_total", &memory->total);
    return code == SUCCESS ? find_wide(device, "memory_used", &memory->used) : code;
}

#define NUMBER(function, name) \
    int function(Device device, unsigned *number) { return find_number(device, name, number); }
#define MODE(function, name) \
    int function(Device device, unsigned *current, unsigned *pending) { \
        *pending = 0; \
        return find_number(device, name, current); \
    }
#define INDEXED(function, name) \
    int function(Device device, int index, unsigned *number) { \
        return find_indexed(device, name, index, number); \
    }

NUMBER(nvmlDeviceGetPersistenceMode, "persistence")
MODE(nvmlDeviceGetMigMode, "mig")
MODE(nvmlDeviceGetEccMode, "ecc")
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "power_limit")
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, "power_default")
INDEXED(nvmlDeviceGetMaxClockInfo, "clock_max")
INDEXED(nvmlDeviceGetClockInfo, "clock")
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_generation_max")
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "pcie_width_max")
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width")
INDEXED(nvmlDeviceGetNvLinkState, "link_active")

int nvmlDeviceGetViolationStatus(Device device, int policy, Wide *times) {
    return policy == 1 ? find_wide(device, "heat_ns", &times[1]) : NOT_SUPPORTED;
}

int nvmlDeviceGetCurrentClocksEventReasons(Device device, Wide *mask) {
    return find_wide(device, "clock_reasons", mask);
}

int nvmlDeviceGetTotalEccErrors(Device device, int type, int counter, Wide *count) {
    return find_wide(device, type ? "errors_uncorrected" : "errors_corrected", count);
}

int nvmlDeviceGetRemappedRows(Device device, unsigned *corrected, unsigned *uncorrected,
                              unsigned *pending, unsigned *failed) {
    char text[64] = "";
    int code = find_text(device, "rows", text, sizeof text);
    *corrected = 0;
    sscanf(text, "%u %u %u", uncorrected, pending, failed);
    return code;
}

struct pci {
    char legacy_id[16];
    unsigned domain, bus, device, ids[2];
    char id[32];
};

int nvmlDeviceGetPciInfo_v3(Device device, struct pci *pci) {
    char text[64] = "";
    int code = find_text(device, "pci", text, sizeof text);
    sscanf(text, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    return code;
}

struct fabric {
    unsigned char cluster[16];
    unsigned status, clique, state;
};

/* The first byte of the cluster's UUID, the number of the clique, the state and its status. */
int nvmlDeviceGetGpuFabricInfo(Device device, struct fabric *fabric) {
    char text[64] = "";
    int code = find_text(device, "fabric", text, sizeof text);
    sscanf(text, "%hhu %u %u %u", fabric->cluster, &fabric->clique, &fabric->state, &fabric->status);
    return code;
}

struct field {
    unsigned id, scope;
    long long timestamp, latency;
    unsigned type;
    int code;
    Wide value;
};

enum { UNSIGNED_LONG_LONG = 3 };

/* The fields of all links of a GPU are equal. */
int nvmlDeviceGetFieldValues(Device device, int count, struct field *fields) {
    for (int i = 0; i < count; i++) {
        char key[64];
        snprintf(key, sizeof key, "field.%u", fields[i].id);
        fields[i].type = UNSIGNED_LONG_LONG;
        fields[i].code = find_wide(device, key, &fields[i].value);
    }
    return SUCCESS;
}

/* The keys of a pair are those of the first GPU, with the number of the second. */
int nvmlDeviceGetP2PStatus(Device first, Device second, int capability, unsigned *status) {
    return find_indexed(first, "nvlink_status", gpu_of(second), status);
}

int nvmlDeviceGetTopologyCommonAncestor(Device first, Device second, unsigned *level) {
    return find_indexed(first, "topology", gpu_of(second), level);
}
