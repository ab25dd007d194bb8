# Run by cpack before it packs: takes this machine's LibTorch out of the search path of the staged libraries.
foreach(library libsf_engine.so libsf_engine_cuda.so libsf_graphs_cuda.so libsf_plugin_test.so)
  file(RPATH_CHANGE FILE ${CPACK_TEMPORARY_INSTALL_DIRECTORY}/lib/sf/${library} OLD_RPATH "${CPACK_SF_INSTALL_RPATH}" NEW_RPATH "${CPACK_SF_PACKAGE_RPATH}")
endforeach()
# find_package(Sf), too, and it says so when an author names a LibTorch that sf will not find.
file(READ ${CPACK_TEMPORARY_INSTALL_DIRECTORY}/lib/cmake/Sf/SfConfig.cmake config)
string(REGEX REPLACE "set\\(SF_BUILT_WITH_TORCH [^\n]*\n" "set(SF_BUILT_WITH_TORCH \"\")\n" config "${config}")
file(WRITE ${CPACK_TEMPORARY_INSTALL_DIRECTORY}/lib/cmake/Sf/SfConfig.cmake "${config}")
file(WRITE ${CPACK_TEMPORARY_INSTALL_DIRECTORY}/README
"sf ${CPACK_PACKAGE_VERSION}: bin/sf-host runs from here. Verbs that need tensors want LibTorch beside it:

    python3 -m pip install --target . torch==2.11.0

(or links 'torch' and 'nvidia' to the folders of that name where the wheel is installed). Beside it only libc and libstdc++ are
needed, which every Debian 12 and Ubuntu 24.04 has. Several ranks on CPUs need libgloo (package libgloo0 on Debian 12); ranks on GPUs do not.
share/sf/recipes has recipes to begin with, share/sf/template a plugin to begin with.
")
