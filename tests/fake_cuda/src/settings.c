/* Environment variables and the trace. */
#define _GNU_SOURCE
#include "settings.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { MAX_LINE = 512, NO_RANK = -1 };

static struct {
    bool is_read;
    int num_gpus;
    ns_t kernel_ns;
    const char *folder;
    size_t max_data_bytes;
    int slow_rank;
    long long slow_ns;
    int slow_device_rank;
    long long slow_device_percent;
    int hanging_rank;
    long long last_collective;
    int trace_file;
} settings;
static int process_rank = NO_RANK;
static long long num_collectives;

static const char *text_of(const char *name, const char *fallback) {
    const char *text = getenv(name);
    return text != NULL && *text != '\0' ? text : fallback;
}

/* Read "RANK:NUMBER". */
static void read_pair(const char *name, int *rank, long long *number) {
    *rank = NO_RANK;
    const char *text = text_of(name, NULL);
    if (text != NULL && sscanf(text, "%d:%lld", rank, number) != 2) {
        fprintf(stderr, "%s is RANK:NUMBER, and not %s\n", name, text);
        abort();
    }
}

static int open_trace(void) {
    const char *prefix = text_of("FAKE_CUDA_TRACE", NULL);
    if (prefix == NULL)
        return -1;
    char path[MAX_LINE];
    snprintf(path, sizeof path, "%s.%d", prefix, getpid());
    return open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static void read_settings(void) {
    settings.num_gpus = atoi(text_of("FAKE_CUDA_GPUS", "8"));
    settings.kernel_ns = atoll(text_of("FAKE_CUDA_KERNEL_NS", "4000"));
    settings.folder = text_of("FAKE_CUDA_FOLDER", "/dev/shm");
    settings.max_data_bytes = atoll(text_of("FAKE_CUDA_DATA_BYTES", "65536"));
    read_pair("FAKE_CUDA_SLOW", &settings.slow_rank, &settings.slow_ns);
    read_pair("FAKE_CUDA_SLOW_DEVICE", &settings.slow_device_rank, &settings.slow_device_percent);
    read_pair("FAKE_CUDA_HANG", &settings.hanging_rank, &settings.last_collective);
    settings.trace_file = open_trace();
    settings.is_read = true;
}

static void ensure_settings(void) {
    if (!settings.is_read)
        read_settings();
}

/* A fork has another trace, and its variables may have changed. */
static void forget_after_fork(void) {
    if (settings.is_read && settings.trace_file >= 0)
        close(settings.trace_file);
    settings.is_read = false;
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, forget_after_fork);
}

int num_gpus(void) {
    ensure_settings();
    return settings.num_gpus;
}

ns_t kernel_ns(void) {
    ensure_settings();
    bool is_slow = process_rank != NO_RANK && process_rank == settings.slow_device_rank;
    return settings.kernel_ns * (is_slow ? settings.slow_device_percent : 100) / 100;
}

const char *communicator_folder(void) {
    ensure_settings();
    return settings.folder;
}

size_t max_data_bytes(void) {
    ensure_settings();
    return settings.max_data_bytes;
}

void set_rank(int rank) {
    if (process_rank == NO_RANK)
        process_rank = rank;
}

void delay_launch(void) {
    ensure_settings();
    if (process_rank == NO_RANK || process_rank != settings.slow_rank)
        return;
    ns_t until = host_now() + settings.slow_ns;
    while (host_now() < until)
        ;
}

bool is_last_collective(void) {
    ensure_settings();
    num_collectives++;
    return process_rank != NO_RANK && process_rank == settings.hanging_rank &&
           num_collectives == settings.last_collective;
}

void trace(const char *call, const char *format, ...) {
    ensure_settings();
    if (settings.trace_file < 0)
        return;
    char line[MAX_LINE];
    int used = snprintf(line, sizeof line, "%lld\t%d\t%s\t", (long long)host_now(), gettid(), call);
    va_list words;
    va_start(words, format);
    used += vsnprintf(line + used, sizeof line - used, format, words);
    va_end(words);
    if (used > MAX_LINE - 2)
        used = MAX_LINE - 2;
    line[used++] = '\n';
    /* One call to the system appends a line whole, whatever other threads do. */
    if (write(settings.trace_file, line, used) != used)
        abort();
}

/* The body of functions that the stub does not have. */
int refuse(const char *name, int code) {
    trace(name, "unsupported=%d", code);
    return code;
}

/* Write a line that tests find again. */
void fake_cuda_mark(const char *text) {
    trace("mark", "text=%s", text);
}
