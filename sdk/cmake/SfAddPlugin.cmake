# sf_add_plugin(name KIND sharding|transform|algorithm|checkpoint|tracker TIER c|torch_cxx
#               MANIFEST plugin.toml SOURCES a.cpp ... [LINK target ...] [FOLDER dir] [CHECK argument ...])
#
# One plugin: a MODULE library lib/sf/plugins/<name>.so of the build folder that exports sf_plugin_entry_v1 and nothing else, is never unloaded, and
# has its manifest embedded. The macro SF_PLUGIN in one of the sources writes the build note; name and version come from the manifest.
# It is installed to lib/sf/plugins, and a test check.<name> runs sf-plugin-check over it, with the arguments of CHECK. A plugin that goes to
# another FOLDER is neither.

function(sf_add_plugin name)
  cmake_parse_arguments(arg "" "KIND;TIER;MANIFEST;FOLDER" "SOURCES;LINK;CHECK" ${ARGN})
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "sf_add_plugin(${name}): unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT arg_KIND MATCHES "^(sharding|transform|algorithm|checkpoint|tracker)$")
    message(FATAL_ERROR "sf_add_plugin(${name}): KIND is '${arg_KIND}', expected sharding, transform, algorithm, checkpoint or tracker")
  endif()
  if(NOT arg_TIER MATCHES "^(c|torch_cxx)$")
    message(FATAL_ERROR "sf_add_plugin(${name}): TIER is '${arg_TIER}', expected c or torch_cxx")
  endif()
  get_filename_component(manifest "${arg_MANIFEST}" ABSOLUTE)
  if(NOT EXISTS "${manifest}")
    message(FATAL_ERROR "sf_add_plugin(${name}): MANIFEST '${arg_MANIFEST}' does not exist")
  endif()
  file(STRINGS "${manifest}" version_line REGEX "^version *= *\"[^\"]+\"" LIMIT_COUNT 1)
  string(REGEX REPLACE "^version *= *\"([^\"]+)\".*" "\\1" version "${version_line}")
  if(NOT version)
    message(FATAL_ERROR "sf_add_plugin(${name}): ${arg_MANIFEST} has no line version = \"...\" in [plugin]")
  endif()
  foreach(pair IN ITEMS "name=${name}" "kind=${arg_KIND}")   # here, and not when the plugin is looked at
    string(REGEX REPLACE "=.*" "" key "${pair}")
    string(REGEX REPLACE "^[a-z]+=" "" expected "${pair}")
    file(STRINGS "${manifest}" line REGEX "^${key} *= *\"[^\"]*\"" LIMIT_COUNT 1)
    string(REGEX REPLACE "^${key} *= *\"([^\"]*)\".*" "\\1" found "${line}")
    if(NOT found STREQUAL expected)
      message(FATAL_ERROR "sf_add_plugin(${name}): ${arg_MANIFEST} says ${key} = \"${found}\", expected \"${expected}\"")
    endif()
  endforeach()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${manifest}")

  # The manifest as an ELF note: header, owner "sf-plugin", then the bytes of the file.
  set(note ${CMAKE_CURRENT_BINARY_DIR}/${name}_manifest_note.cpp)
  file(CONFIGURE OUTPUT ${note} @ONLY CONTENT [=[
__asm__(
    ".pushsection .note.sf_manifest, \"a\", @note\n"
    ".balign 4\n"
    ".long 10, 2f - 1f, 2\n"
    ".asciz \"sf-plugin\"\n"
    ".balign 4\n"
    "1: .incbin \"@manifest@\"\n"
    "2: .balign 4\n"
    ".popsection\n");
]=])
  set_property(SOURCE ${note} PROPERTY OBJECT_DEPENDS "${manifest}")
  set_property(SOURCE ${note} PROPERTY SKIP_PRECOMPILE_HEADERS ON)

  add_library(${name} MODULE ${arg_SOURCES} ${note})
  if(TARGET Sf::sdk)
    target_link_libraries(${name} PRIVATE Sf::sdk)
  endif()
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})   # includes are written from the root of the author's project
  target_link_libraries(${name} PRIVATE ${arg_LINK})
  set(variant "")
  if(arg_TIER STREQUAL torch_cxx)
    if(NOT COMMAND sf_use_torch)
      message(FATAL_ERROR "sf_add_plugin(${name}): TIER torch_cxx needs LibTorch${SF_TORCH_WANTED}; set Sf_TORCH_ROOT to the torch folder of its wheel")
    endif()
    sf_use_torch(${name})
    set(variant "${SF_TORCH_VARIANT}")
  endif()
  target_compile_features(${name} PRIVATE cxx_std_20)
  target_compile_definitions(${name} PRIVATE SF_PLUGIN_NAME="${name}" SF_PLUGIN_VERSION="${version}"
                                             SF_PLUGIN_TORCH_VARIANT="${variant}")
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fno-gnu-unique>)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    target_compile_options(${name} PRIVATE -O2)   # of a project that says nothing
  endif()
  target_link_options(${name} PRIVATE -Wl,-z,defs -Wl,-z,nodelete -Wl,--no-undefined
                                      -Wl,--version-script=${CMAKE_CURRENT_FUNCTION_LIST_DIR}/plugin.map)
  set_property(TARGET ${name} APPEND PROPERTY LINK_DEPENDS ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/plugin.map)
  if(NOT arg_FOLDER)
    set(arg_FOLDER ${CMAKE_BINARY_DIR}/lib/sf/plugins)
    install(TARGETS ${name} LIBRARY DESTINATION lib/sf/plugins)
    if(SF_PLUGIN_CHECK)
      add_test(NAME check.${name} COMMAND ${SF_PLUGIN_CHECK} $<TARGET_FILE:${name}> ${arg_CHECK})
      set_tests_properties(check.${name} PROPERTIES TIMEOUT 120 ENVIRONMENT "OMP_NUM_THREADS=1")
    endif()
  endif()
  set_target_properties(${name} PROPERTIES
    PREFIX "" SUFFIX ".so" LIBRARY_OUTPUT_DIRECTORY ${arg_FOLDER}
    CXX_VISIBILITY_PRESET hidden C_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
    SKIP_BUILD_RPATH ON BUILD_RPATH "" INSTALL_RPATH "")
endfunction()
