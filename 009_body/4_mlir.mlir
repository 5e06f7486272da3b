func.func private @_mlir_ciface_pbk_trace(i64, i64, i64)
func.func @k0_body(%a0: memref<32xf32> {llvm.noalias}, %a1: memref<32xf32> {llvm.noalias}, %arena: memref<256xi8> {llvm.noalias}, %low: index, %high: index) {
%v1 = arith.constant dense<0xFF800000> : vector<8xf32>
%v2 = arith.constant dense<true> : vector<8xi1>
%v3 = arith.constant 8 : index
%v8 = arith.constant 0x41C40000 : f32
%v14 = arith.constant 0 : index
%v15 = arith.constant true
%v19 = arith.constant 0 : i32
%v21 = arith.constant 1 : i32
%v38 = arith.constant 0x40000000 : f32
%v41 = arith.constant 64 : index
%v42 = arith.constant 128 : index
%v43 = arith.constant 192 : index
%v44 = arith.constant 1 : index
%t4 = memref.view %arena[%v14][] : memref<256xi8> to memref<1xi32>
%t3 = memref.view %arena[%v41][] : memref<256xi8> to memref<1xf32>
%t7 = memref.view %arena[%v14][] : memref<256xi8> to memref<1xi32>
%t6 = memref.view %arena[%v42][] : memref<256xi8> to memref<1xf32>
%t5 = memref.view %arena[%v43][] : memref<256xi8> to memref<1xf32>
scf.for %p = %low to %high step %v44 {
%v4 = arith.muli %p, %v3 : index
%v5 = vector.load %a0[%v4] : memref<32xf32>, vector<8xf32>
%v6 = arith.cmpf ogt, %v1, %v5 : vector<8xf32>
%v7 = arith.select %v6, %v1, %v5 : vector<8xi1>, vector<8xf32>
%v9 = vector.broadcast %v8 : f32 to vector<8xf32>
%v10 = arith.cmpf olt, %v5, %v9 : vector<8xf32>
%v11 = arith.andi %v2, %v10 : vector<8xi1>
%v12 = vector.reduction <maximumf>, %v7 : vector<8xf32> into f32
%v13 = vector.reduction <and>, %v11 : vector<8xi1> into i1
memref.store %v12, %t3[%v14] : memref<1xf32>
%v16 = arith.xori %v13, %v15 : i1
%v17 = arith.extui %v16 : i1 to i32
memref.store %v17, %t4[%v14] : memref<1xi32>
%v18 = memref.load %t4[%v14] : memref<1xi32>
%v20 = arith.maxsi %v18, %v19 : i32
%v22 = arith.minsi %v20, %v21 : i32
%v23 = arith.index_cast %v22 : i32 to index
%v24 = arith.cmpi eq, %v23, %v14 : index
scf.if %v24 {
} else {
%v25 = memref.load %t3[%v14] : memref<1xf32>
memref.store %v25, %t5[%v14] : memref<1xf32>
memref.store %v8, %t6[%v14] : memref<1xf32>
%v26 = arith.index_cast %p : index to i32
memref.store %v26, %t7[%v14] : memref<1xi32>
%v27 = arith.constant 2 : i64
%v28 = memref.extract_aligned_pointer_as_index %t5 : memref<1xf32> -> index
%v29 = arith.index_cast %v28 : index to i64
%v30 = arith.constant 0 : i64
func.call @_mlir_ciface_pbk_trace(%v27, %v30, %v29) : (i64, i64, i64) -> ()
%v31 = memref.extract_aligned_pointer_as_index %t6 : memref<1xf32> -> index
%v32 = arith.index_cast %v31 : index to i64
%v33 = arith.constant 1 : i64
func.call @_mlir_ciface_pbk_trace(%v27, %v33, %v32) : (i64, i64, i64) -> ()
%v34 = memref.extract_aligned_pointer_as_index %t7 : memref<1xi32> -> index
%v35 = arith.index_cast %v34 : index to i64
%v36 = arith.constant 2 : i64
func.call @_mlir_ciface_pbk_trace(%v27, %v36, %v35) : (i64, i64, i64) -> ()
}
%v37 = vector.load %a0[%v4] : memref<32xf32>, vector<8xf32>
%v39 = vector.broadcast %v38 : f32 to vector<8xf32>
%v40 = arith.mulf %v37, %v39 fastmath<contract> : vector<8xf32>
vector.store %v40, %a1[%v4] : memref<32xf32>, vector<8xf32>
}
return
}
func.func private @k0_body(!llvm.ptr, !llvm.ptr, !llvm.ptr, i64, i64)
func.func private @pbk_task0(%args: !llvm.ptr, %low: i64, %high: i64, %slot: i64) {
%g0 = llvm.getelementptr %args[0] : (!llvm.ptr) -> !llvm.ptr, i8
%p0 = llvm.load %g0 : !llvm.ptr -> !llvm.ptr
%g1 = llvm.getelementptr %args[8] : (!llvm.ptr) -> !llvm.ptr, i8
%p1 = llvm.load %g1 : !llvm.ptr -> !llvm.ptr
%g2 = llvm.getelementptr %args[16] : (!llvm.ptr) -> !llvm.ptr, i8
%p2 = llvm.load %g2 : !llvm.ptr -> !llvm.ptr
%size = arith.constant 256 : i64
%at = arith.muli %slot, %size : i64
%mine = llvm.getelementptr %p2[%at] : (!llvm.ptr, i64) -> !llvm.ptr, i8
func.call @k0_body(%p0, %p1, %mine, %low, %high) : (!llvm.ptr, !llvm.ptr, !llvm.ptr, i64, i64) -> ()
return
}
func.func @pbk_main(%frame: !llvm.ptr, %buffers: !llvm.ptr, %arena: !llvm.ptr) {
%h1 = arith.constant 1 : i64
%h2 = llvm.alloca %h1 x !llvm.array<3 x ptr> : (i64) -> !llvm.ptr
%h3 = llvm.getelementptr %arena[0] : (!llvm.ptr) -> !llvm.ptr, i8
%h4 = llvm.getelementptr %buffers[0] : (!llvm.ptr) -> !llvm.ptr, i8
%h5 = llvm.load %h4 : !llvm.ptr -> !llvm.ptr
%h6 = llvm.getelementptr %buffers[8] : (!llvm.ptr) -> !llvm.ptr, i8
%h7 = llvm.load %h6 : !llvm.ptr -> !llvm.ptr
%h8 = llvm.getelementptr %h2[0] : (!llvm.ptr) -> !llvm.ptr, i8
llvm.store %h5, %h8 : !llvm.ptr, !llvm.ptr
%h9 = llvm.getelementptr %h2[8] : (!llvm.ptr) -> !llvm.ptr, i8
llvm.store %h7, %h9 : !llvm.ptr, !llvm.ptr
%h10 = llvm.getelementptr %h2[16] : (!llvm.ptr) -> !llvm.ptr, i8
llvm.store %h3, %h10 : !llvm.ptr, !llvm.ptr
%h11 = arith.constant 4 : i64
%h12 = arith.constant 0 : i64
func.call @pbk_task0(%h2, %h12, %h11, %h12) : (!llvm.ptr, i64, i64, i64) -> ()
return
}
