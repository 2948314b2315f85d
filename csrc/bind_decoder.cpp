#include "bindings.h"
namespace octavo { void bind_decoder(nanobind::module_&) {} }
