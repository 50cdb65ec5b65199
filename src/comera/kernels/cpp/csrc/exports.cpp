#include "exports.h"

// constructed on first use: exports of other files may be recorded before the variables of this one are initialized
static std::string& signatures() {
    static std::string text;
    return text;
}

void Export::record(const char* name, const std::string& kinds) {
    signatures() += std::string(name) + "=" + kinds + ";";
}

// "name=kinds;" of every exported function.
extern "C" const char* comera_signatures() { return signatures().c_str(); }
