# ccache, set so that a second clone in another folder hits everything, precompiled header included.
find_program(SF_CCACHE ccache)
if(SF_CCACHE)
  set(launcher ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime)
  if(DEFINED ENV{SF_CCACHE_DIR})
    list(APPEND launcher CCACHE_DIR=$ENV{SF_CCACHE_DIR})
  endif()
  set(CMAKE_CXX_COMPILER_LAUNCHER ${launcher} ${SF_CCACHE})
  set(CMAKE_C_COMPILER_LAUNCHER ${launcher} ${SF_CCACHE})
endif()
