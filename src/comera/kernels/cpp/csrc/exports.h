// The functions that Python calls, and their signatures as text: the one list of them, which library.py reads. A signature is
// derived from the function's type, so it cannot be out of date.
//
// Kinds of arguments: i int, l long, f float, d double, p pointer, wN pointer to structs of N 64-bit words, t number of
// threads. Every function returns a status: 0, 1 if memory ran out, or 2 if it refused numbers in its operands.
#pragma once

#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>

enum Threads : int {};  // their number

template <class T>
std::string kind() {
    using Target = std::remove_pointer_t<T>;
    if constexpr (std::is_class_v<Target>) return "w" + std::to_string(sizeof(Target) / 8);
    else if constexpr (std::is_pointer_v<T>) return "p";
    else if constexpr (std::is_same_v<T, Threads>) return "t";
    else if constexpr (std::is_same_v<T, int>) return "i";
    else if constexpr (std::is_same_v<T, long>) return "l";
    else if constexpr (std::is_same_v<T, float>) return "f";
    else {
        static_assert(std::is_same_v<T, double>);
        return "d";
    }
}

struct Export {
    template <class... Args>
    Export(const char* name, int (*)(Args...)) {
        std::string kinds;
        ((kinds += (kinds.empty() ? "" : " ") + kind<Args>()), ...);
        record(name, kinds);
    }
    static void record(const char* name, const std::string& kinds);
};
#define EXPORT(name) static const Export export_##name(#name, name)

template <class Body>
int status(Body body) {
    try {
        body();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    } catch (const std::invalid_argument&) {
        return 2;
    }
}
