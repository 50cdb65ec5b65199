// Tensors (batch, heads, rows, columns) whose columns are contiguous and whose other dimensions have any strides.
#pragma once

// Four words from Python.
struct View {
    float* at;
    long batch, head, row;  // strides; 0 where it is broadcast
    float* from(long b, long h, long r) const { return at + b * batch + h * head + r * row; }
};
