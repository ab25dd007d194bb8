// manifest.cpp wants the host's own manifest; these targets never ask for it.
namespace sf {
extern const char* const kHostManifestText;
const char* const kHostManifestText = "";
}  // namespace sf
