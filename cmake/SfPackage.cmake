# What is installed beside the programs, libraries and headers, and the tarball (cpack).
install(DIRECTORY ${CMAKE_SOURCE_DIR}/recipes DESTINATION share/sf PATTERN "tiny*" EXCLUDE)   # the tiny ones use the tests' target; the template brings its own
install(FILES ${CMAKE_SOURCE_DIR}/LICENSE ${CMAKE_SOURCE_DIR}/CHANGELOG.md DESTINATION share/sf)

# The template as it is, with a target of two hundred thousand weights and a few conversations to train on.
install(DIRECTORY ${CMAKE_SOURCE_DIR}/sdk/template DESTINATION share/sf)
install(FILES ${CMAKE_SOURCE_DIR}/tests/parity/golden/target_llama_tied/config.json ${CMAKE_SOURCE_DIR}/tests/parity/golden/target_llama_tied/model.safetensors
        DESTINATION share/sf/template/tiny/target)
install(DIRECTORY ${CMAKE_SOURCE_DIR}/recipes/data/tiny/ DESTINATION share/sf/template/tiny FILES_MATCHING PATTERN "*.jsonl")

# All options of the host and of the installed plugins, for TOML editors: told by the installed program itself.
install(CODE [[
  set(root "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}")
  execute_process(COMMAND "${root}/bin/sf-host" schema --allow-unsafe-path "${root}/lib/sf/plugins" OUTPUT_FILE "${root}/share/sf/schema.json"
                  RESULT_VARIABLE code)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "the installed sf-host can't print its schema")
  endif()
]])

set(CPACK_GENERATOR TGZ)
set(CPACK_PACKAGE_NAME sf)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_FILE_NAME sf-${PROJECT_VERSION}-linux-x86_64)
set(CPACK_VERBATIM_VARIABLES ON)
# A package looks for LibTorch beside itself alone: what this machine's folders are called does not concern another.
set(CPACK_PRE_BUILD_SCRIPTS ${CMAKE_SOURCE_DIR}/cmake/SfPackageRpath.cmake)
string(REPLACE ";" ":" CPACK_SF_INSTALL_RPATH "${SF_INSTALL_RPATH}")
string(REPLACE ";" ":" CPACK_SF_PACKAGE_RPATH "${SF_PACKAGE_RPATH}")
include(CPack)
