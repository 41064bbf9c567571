// Four faults made on purpose, one for each tool of compute-sanitizer: a run that does not report them has seen nothing.
#include <cstdio>
#include <cstdlib>

namespace mlspec {

__global__ void beyond_the_end(float* x, int n) { x[n + threadIdx.x] = 1.0f; }

__global__ void race(float* y) {
    __shared__ float held[64];
    held[threadIdx.x] = float(threadIdx.x);
    y[threadIdx.x] = held[63 - threadIdx.x];
}

__global__ void never_written(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }

__global__ void half_a_warp_waits(float* y) {
    if (threadIdx.x % 2) __syncthreads();
    y[threadIdx.x] = 1.0f;
}

}  // namespace mlspec

int main(int count, char** words) {
    float *x, *y;
    cudaMalloc(&x, 256);
    cudaMalloc(&y, 256);
    switch (count > 1 ? std::atoi(words[1]) : 0) {
        case 0: mlspec::beyond_the_end<<<1, 64>>>(x, 64); break;
        case 1: mlspec::race<<<1, 64>>>(y); break;
        case 2: mlspec::never_written<<<1, 64>>>(x, y); break;
        default: mlspec::half_a_warp_waits<<<1, 64>>>(y);
    }
    std::printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
