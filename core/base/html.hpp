// core/base/html.hpp: text as it stands in a page. No LibTorch.
#pragma once

#include <string>
#include <string_view>

namespace sf {

/// `text` with the four characters that mean something in HTML (& < > ") written as entities.
[[nodiscard]] std::string escaped_html(std::string_view text);

}  // namespace sf
