/* cuBLAS and cuBLASLt: each operation is a kernel. generate.py writes those of cuBLAS that only launch. */
#include <stdlib.h>

#include "runtime.h"
#include "settings.h"

enum { VERSION_NUMBER = 130101, SUCCESS = 0 };

struct handle {
    cudaStream_t stream;
};

int cublasCreate_v2(struct handle **handle) {
    *handle = calloc(1, sizeof **handle);
    return SUCCESS;
}

int cublasDestroy_v2(struct handle *handle) {
    free(handle);
    return SUCCESS;
}

int cublasSetStream_v2(struct handle *handle, cudaStream_t stream) {
    handle->stream = stream;
    return SUCCESS;
}

int cublasGetMathMode(struct handle *handle, int *mode) {
    *mode = 0;
    return SUCCESS;
}

int cublasGetPointerMode_v2(struct handle *handle, int *mode) {
    *mode = 0;
    return SUCCESS;
}

int cublasGetVersion_v2(struct handle *handle, int *version) {
    *version = VERSION_NUMBER;
    return SUCCESS;
}

/* The body of cublasSgemm_v2 and the like, whose first argument is the handle. */
int launch_blas(struct handle *handle, const char *name) {
    launch_kernel(name, kernel_ns(), handle->stream);
    return SUCCESS;
}

size_t cublasLtGetVersion(void) {
    return VERSION_NUMBER;
}

int cublasLtCreate(struct handle **handle) {
    return cublasCreate_v2(handle);
}

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c,
                                   void *d, void *preference, int num_requested, void *results,
                                   int *num_results) {
    *num_results = 1;
    return SUCCESS;
}

int cublasLtMatmul(void *handle, void *operation, const void *alpha, const void *a, void *a_layout,
                   const void *b, void *b_layout, const void *beta, const void *c, void *c_layout,
                   void *d, void *d_layout, const void *algorithm, void *workspace,
                   size_t workspace_bytes, cudaStream_t stream) {
    launch_kernel("cublasLtMatmul", kernel_ns(), stream);
    return SUCCESS;
}
