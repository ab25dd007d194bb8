#include "core/train/out_of_memory.hpp"

#include <c10/util/Exception.h>

#include <string_view>

namespace sf {

namespace {
constexpr std::string_view kAllocator = "DefaultCPUAllocator";
}

bool is_out_of_memory(const c10::Error& error) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr || std::string_view(error.what_without_backtrace()).find(kAllocator) != std::string_view::npos;
}

Error out_of_memory(const c10::Error& error, const std::string& where, const char* advice) {
  std::string what = error.what_without_backtrace();
  if (const auto begin = what.find(kAllocator); begin != std::string::npos) {
    what = "out of memory: " + what.substr(begin);
  }
  return Error(ExitCode::kDevice, where.empty() ? what : where + ": " + what, advice);
}

}  // namespace sf
